"""What FlashInfer's wrappers promise, computed in torch: for tests without a GPU.

Written from the documentation of flashinfer 0.7.4. scripts/flashinfer_signatures.py compares the signatures with the real ones. The
log-sum-exp is to base 2.

BatchMLAPagedAttentionWrapper (flashinfer.mla): sequence b has the pages kv_indices[kv_indptr[b]:kv_indptr[b + 1]] and
kv_len_arr[b] tokens in them; its queries are rows qo_indptr[b]:qo_indptr[b + 1]. With `causal` the last query sees all tokens,
the one before it all but the last, and so on. A query that sees none has the result zero.

BatchDecodeWithPagedKVCacheWrapper (flashinfer.decode): request b has one query, the pages indices[indptr[b]:indptr[b + 1]], at
least one, and last_page_len[b] tokens of the last of them. With use_cuda_graph it reads the indices from the buffer at each run,
as a captured graph does. Nothing is promised for a request without pages, so that there is an error here.
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


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.numel() >= 128 << 20
        assert kv_layout == "NHD"
        assert use_cuda_graph
        assert use_tensor_cores, "without them only some numbers of heads are served"
        assert backend == "fa2", "others needn't read the buffers at each run"
        self.workspace, self.device = float_workspace_buffer, float_workspace_buffer.device
        self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert all(buffer is not None and buffer.device == self.device for buffer in self.buffers)
        assert len(self.buffers[0]) == len(self.buffers[2]) + 1
        self.planned = False

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        metadata = (indptr, indices, last_page_len)
        assert all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in metadata)
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim in (64, 128, 256)
        assert len(last_page_len) == len(self.buffers[2]), "a captured batch can't change its size"
        assert len(indices) == int(indptr[-1])
        assert int(indptr.diff().min()) >= 1
        assert 1 <= int(last_page_len.min()) <= int(last_page_len.max()) <= page_size
        for buffer, tensor in zip(self.buffers, metadata, strict=True):
            buffer[: len(tensor)].copy_(tensor)  # raises where it is too small
        self.shape = (num_qo_heads, num_kv_heads, head_dim)
        self.page_size, self.scale = page_size, head_dim**-0.5 if sm_scale is None else sm_scale
        self.dtypes = (q_data_type, kv_data_type)
        self.planned = True

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        assert self.planned, "run before plan"
        heads, kv_heads, dim = self.shape
        keys, values = paged_kv_cache
        assert q.shape == (len(self.buffers[2]), heads, dim)
        assert keys.shape == values.shape == (len(keys), self.page_size, kv_heads, dim)
        assert keys.stride() == values.stride(), "keys and values must have the same strides"
        assert keys.stride(-1) == q.stride(-1) == 1
        assert (q.dtype, keys.dtype, values.dtype) == (*self.dtypes, self.dtypes[1])
        assert keys.data_ptr() % 16 == values.data_ptr() % 16 == 0
        indptr, indices, last = (buffer.tolist() for buffer in self.buffers)
        made, sums = [], []
        for b, query in enumerate(q.cpu().double().unflatten(1, (kv_heads, -1))):
            pages = torch.tensor(indices[indptr[b] : indptr[b + 1]])
            assert int(pages.min()) >= 0
            tokens = (len(pages) - 1) * self.page_size + last[b]
            k, v = (cache[pages].flatten(0, 1)[:tokens].cpu().double().transpose(0, 1) for cache in (keys, values))
            scores = query @ k.mT * self.scale  # of each KV head its query heads'
            made.append((scores.softmax(-1) @ v).flatten(0, 1))
            sums.append((scores.logsumexp(-1) / math.log(2)).flatten())
        result = torch.stack(made).to(q)
        return (result, torch.stack(sums).float().to(q.device)) if return_lse else result
