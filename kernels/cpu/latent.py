"""Attention over a latent cache by the CPU kernels (mla.h says what is computed): tensors in, sizes checked.

Legend: N heads, P qk_nope, R qk_rope, L kv_lora_rank, V v_head_dim; Q query rows (tokens), S sequences, G pages of T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ktopt.kernels.cpu import Blocks, _needed
from ktopt.weights.ggml_types import BY_NAME

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HeadBlocks:
    """One matrix (rows, columns) for each head, in stored blocks: head h's rows are `first` to `first` + rows of a piece of `step`
    rows of `blocks`. So a fused kv_b_proj serves as both of its matrices without a copy. Vectors meet its rows, or where it is
    `transposed` its columns."""

    blocks: Blocks
    rows: int
    step: int
    first: int = 0
    transposed: bool = False

    def call(self, heads: int) -> tuple[int, int, int, int, int, int, int]:
        """What the extension takes: type number, address, rows, columns, bytes in all, bytes from head to head, transposed."""
        kind, address, rows, columns, nbytes = self.blocks.call
        row_bytes = nbytes // rows
        if self.first + self.rows > self.step or heads * self.step != rows:
            raise ValueError(f"{heads} heads of {self.step} rows don't fit {rows} rows")
        reach = ((heads - 1) * self.step + self.rows) * row_bytes
        return kind, address + self.first * row_bytes, self.rows, columns, reach, self.step * row_bytes, self.transposed


def _cache_call(cache_GTW: torch.Tensor, kind: str, table_SC: torch.Tensor, rows_Q3: torch.Tensor) -> tuple[int, ...]:
    pages, tokens = cache_GTW.shape[:2]
    if not cache_GTW.is_contiguous() or not table_SC.is_contiguous() or not rows_Q3.is_contiguous():
        raise ValueError("cache, page table and rows must be contiguous")
    if (
        table_SC.ndim != 2
        or table_SC.element_size() != 4
        or rows_Q3.ndim != 2
        or rows_Q3.shape[1] != 3
        or rows_Q3.element_size() != 8
    ):
        raise ValueError("the page table must be int32 (sequences, pages), the rows int64 (rows, 3)")
    return (
        *(BY_NAME[kind].number, cache_GTW.data_ptr(), pages, tokens, cache_GTW.nbytes),
        *(table_SC.data_ptr(), *table_SC.shape),
        *(rows_Q3.data_ptr(), rows_Q3.shape[0]),
    )


def latent_attention(
    query_QNW: torch.Tensor,
    cache_GTW: torch.Tensor,
    kind: str,
    table_SC: torch.Tensor,
    rows_Q3: torch.Tensor,
    latent: int,
    scale: float,
    threads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of absorbed queries: (Q, N, L) float32 and the logarithm of each sum (Q, N), -inf for a row without tokens.

    query     (Q, N, L + R) float32: [q_nope W_UK, q_pe], rotated
    cache     (G, T, bytes or numbers of L + R): [c, k_pe] of each token, in blocks of `kind`, any dtype that holds those bytes
    table     (S, C) int32: the pages of each sequence
    rows      (Q, 3) int64: of each query its row of the table, and the tokens [start, end) that it attends to
    ValueError where sizes don't fit.
    """
    import torch

    queries, heads, width = query_QNW.shape
    if query_QNW.dtype is not torch.float32 or not query_QNW.is_contiguous() or rows_Q3.shape[0] != queries:
        raise ValueError("the query must be float32, contiguous, with a row for each of its tokens")
    out, log_sum = torch.empty(queries, heads, latent), torch.empty(queries, heads)
    shape = (heads, 1, width - latent, latent, 1)
    call = (*shape, *_cache_call(cache_GTW, kind, table_SC, rows_Q3))
    _needed().latent_attention(*call, query_QNW.data_ptr(), out.data_ptr(), log_sum.data_ptr(), threads, scale)
    return out, log_sum


def absorbed_attention(
    query_QNH: torch.Tensor,
    cache_GTW: torch.Tensor,
    kind: str,
    table_SC: torch.Tensor,
    rows_Q3: torch.Tensor,
    keys: HeadBlocks,
    values: HeadBlocks,
    scale: float,
    threads: int,
) -> torch.Tensor:
    """All that is between the projections: query (Q, N, P + R) float32, rotated, to (Q, N, V) float32.

    `keys` is W_UK, for each head (L, P), or (P, L) and transposed, as kv_b_proj holds it; `values` is W_UV (V, L). The rest is
    as above.
    """
    import torch

    queries, heads, numbers = query_QNH.shape
    if query_QNH.dtype is not torch.float32 or not query_QNH.is_contiguous() or rows_Q3.shape[0] != queries:
        raise ValueError("the query must be float32, contiguous, with a row for each of its tokens")
    value, latent = values.rows, values.blocks.columns
    nope = keys.rows if keys.transposed else keys.blocks.columns
    out = torch.empty(queries, heads, value)
    shape = (heads, nope, numbers - nope, latent, value)
    _needed().absorbed_attention(
        *shape,
        *_cache_call(cache_GTW, kind, table_SC, rows_Q3),
        *keys.call(heads),
        *values.call(heads),
        query_QNH.data_ptr(),
        out.data_ptr(),
        threads,
        scale,
    )
    return out
