"""Absorbed latent attention on NVIDIA GPUs by FlashInfer's BatchMLAPagedAttentionWrapper, over the pages of a latent cache.

FlashInfer plans a call before it runs it, which synchronises with the device. All layers of a step have the same pages, so one
`FlashInferLatent`, kept with the cache, plans once a step. Keyword arguments and flat metadata are what versions 0.6 and 0.7 share.

Legend: B sequences, Q query tokens of all of them, N heads, G pages of T tokens, W = L + R numbers of a token.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from ktopt.kernels.cuda.flashinfer import WORKSPACE_BYTES, refuses_device

WIDTHS = (512, 64)
"""Latent and rotated numbers of a token that the kernels are made for."""
DTYPES = (torch.bfloat16, torch.float16)


def wrapper_class() -> Any:
    """FlashInfer's wrapper. ImportError where it isn't installed."""
    return import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper


@cache
def refuses(device: torch.device, latent: int, rope: int, dtype: torch.dtype) -> str:
    """Why FlashInfer can't compute this attention, or ""."""
    if reason := refuses_device(device):
        return reason
    if (latent, rope) != WIDTHS:
        return f"it takes latents of {WIDTHS[0]} and {WIDTHS[1]} numbers, not {latent} and {rope}"
    return "" if dtype in DTYPES else f"it takes bfloat16 and float16, not {dtype}"


class FlashInferLatent:
    """A planned wrapper on one device. `batch` and `most_tokens` (of all sequences together) make its buffers fixed, as CUDA graphs
    want them. A copy of it is a new one, which has planned nothing."""

    def __init__(self, device: torch.device, batch: int = 0, most_tokens: int = 0) -> None:
        self.device, self.fixed = device, (batch, most_tokens) if most_tokens else ()
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=device)
        fixed: dict[str, Any] = {}
        if most_tokens:  # a page may hold one token
            sizes = {"qo_indptr": batch + 1, "kv_indptr": batch + 1, "kv_indices": most_tokens, "kv_len_arr": batch}
            fixed = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
        self._wrapper = wrapper_class()(workspace, use_cuda_graph=bool(fixed), backend="auto", **fixed)
        self._planned: Any = None
        self.plans = 0

    def __reduce__(self) -> Any:
        return type(self), (self.device, *self.fixed)

    def plan(
        self,
        step: Any,
        table_BC: torch.Tensor,
        queries: int,
        tokens: int,
        starts_B: torch.Tensor | None,
        page_tokens: int,
        **shape: Any,
    ) -> None:
        """Prepare for a step, unless the last plan was for an equal `step`.

        Each sequence's `queries` last tokens attend to the first `tokens` of its row of the page table, the last of them to all,
        and to none before `starts_B`. `shape` goes to FlashInfer as it is: num_heads, head_dim_ckv, head_dim_kpe, sm_scale,
        q_data_type and kv_data_type.
        """
        if self._planned is not None and step == self._planned:
            return
        batch = table_BC.shape[0]
        table = table_BC.cpu()
        if starts_B is not None:  # a sequence may begin within a page: every token counts as a page of its own
            slots_BN = (table.long()[:, :, None] * page_tokens + torch.arange(page_tokens)).flatten(1)[:, :tokens]
            rows = [row[int(start) :] for row, start in zip(slots_BN, starts_B.cpu().clamp(max=tokens), strict=True)]
            page_tokens = 1
        else:
            rows = list(table[:, : -(-tokens // page_tokens)])
        lengths = [tokens] * batch if starts_B is None else [len(row) for row in rows]
        self._wrapper.plan(
            qo_indptr=torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32),
            kv_indptr=torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int32).cumsum(0).int(),
            kv_indices=torch.cat(rows).int(),
            kv_len_arr=torch.tensor(lengths, dtype=torch.int32),
            page_size=page_tokens,
            causal=True,
            **shape,
        )
        self._planned, self._page_tokens = step, page_tokens
        self.plans += 1

    def run(self, query_QNW: torch.Tensor, pages_GTW: torch.Tensor, latent: int) -> torch.Tensor:
        """Absorbed queries [q_nope W_UK, q_pe] to weighted latents (Q, N, L), both in the cache's dtype."""
        pages = pages_GTW.view(-1, self._page_tokens, pages_GTW.shape[2])
        made: torch.Tensor = self._wrapper.run(
            q_nope=query_QNW[..., :latent].contiguous(),
            q_pe=query_QNW[..., latent:].contiguous(),
            ckv_cache=pages[..., :latent],
            kpe_cache=pages[..., latent:],
            return_lse=False,
        )
        return made
