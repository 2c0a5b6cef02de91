"""What flashinfer.mla.BatchMLAPagedAttentionWrapper promises, computed in torch: for tests without a GPU.

Written from the documentation of flashinfer 0.7.4. scripts/flashinfer_signatures.py compares its signatures with the real ones.
Sequence b has the pages kv_indices[kv_indptr[b]:kv_indptr[b + 1]] and kv_len_arr[b] tokens in them; its queries are rows
qo_indptr[b]:qo_indptr[b + 1]. With `causal` the last query sees all tokens, the one before it all but the last, and so on. A query
that sees none has the result zero. The log-sum-exp is to base 2.
"""

from __future__ import annotations

import math

import torch

CONTIGUOUS = "must be contiguous"


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.numel() >= 128 << 20
        assert backend == "auto"
        self.device = float_workspace_buffer.device
        self.buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr) if use_cuda_graph else None
        self.planned = False

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        metadata = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all(tensor.dtype is torch.int32 for tensor in metadata)
        assert all(tensor.device.type in ("cpu", self.device.type) for tensor in metadata)
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        assert kv_indices.numel() == int(kv_indptr[-1])
        for pages, tokens in zip(kv_indptr.diff().tolist(), kv_len_arr.tolist(), strict=True):
            assert pages == -(-tokens // page_size), f"{tokens} tokens are not in {pages} pages of {page_size}"
        if self.buffers is not None:
            assert len(kv_len_arr) == len(self.buffers[3]), "a captured batch can't change its size"
            for buffer, tensor in zip(self.buffers, metadata, strict=True):
                buffer[: tensor.numel()].copy_(tensor)  # raises where it is too small
        self.metadata = metadata
        self.shape = (num_heads, head_dim_ckv, head_dim_kpe)
        self.page_size, self.causal, self.scale = page_size, causal, sm_scale
        self.dtypes = (q_data_type, kv_data_type)
        self.planned = True

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        assert self.planned, "run before plan"
        heads, latent, rope = self.shape
        qo_indptr, kv_indptr, kv_indices, kv_len = (tensor.tolist() for tensor in self.metadata)
        assert q_nope.shape == (qo_indptr[-1], heads, latent)
        assert q_pe.shape == (qo_indptr[-1], heads, rope)
        assert ckv_cache.shape[1:] == (self.page_size, latent)
        assert kpe_cache.shape[1:] == (self.page_size, rope)
        assert q_nope.dtype == q_pe.dtype == self.dtypes[0]
        assert ckv_cache.dtype == kpe_cache.dtype == self.dtypes[1]
        made = torch.zeros(q_nope.shape, dtype=torch.float64)
        sums = torch.full(q_nope.shape[:2], -math.inf, dtype=torch.float64)
        for b, tokens in enumerate(kv_len):
            pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
            ckv = ckv_cache[pages].flatten(0, 1)[:tokens].double()
            kpe = kpe_cache[pages].flatten(0, 1)[:tokens].double()
            queries = range(qo_indptr[b], qo_indptr[b + 1])
            for number, row in enumerate(queries):
                seen = tokens - (len(queries) - 1 - number) if self.causal else tokens
                if seen <= 0:
                    continue
                scores = (q_nope[row].double() @ ckv[:seen].T + q_pe[row].double() @ kpe[:seen].T) * self.scale
                made[row] = scores.softmax(-1) @ ckv[:seen]
                sums[row] = scores.logsumexp(-1) / math.log(2)
        result = made.to(q_nope.dtype)
        return (result, sums.float()) if return_lse else result
