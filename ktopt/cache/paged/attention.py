"""The attention implementation "ktopt_paged" of transformers' attention interface: each sequence of a step attends to its own
pages. In torch, for layers that no kernel runs whole, and as what kernels are compared with.

Legend: S rows, N query heads, D numbers of a key, V of a value.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ktopt.cache.attention_asked import scale_and_window
from ktopt.cache.paged.batch import PagedBatch
from ktopt.diagnostics import KtoptError

NAME = "ktopt_paged"


class Running(threading.local):
    """The step that runs in this thread."""

    batch: PagedBatch | None = None


running = Running()


@contextmanager
def paged_attention(configs: Iterable[Any], batch: PagedBatch) -> Iterator[None]:
    """While this lasts, the attention of models with these configs is to the pages of a step."""
    before = [(config, config._attn_implementation) for config in configs]
    _register()
    running.batch = batch
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        running.batch = None
        for config, name in before:
            config._attn_implementation = name


def _register() -> None:
    """Make the implementation known to transformers, which makes no masks for one that it knows no masks of."""
    from transformers import AttentionInterface

    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, attention)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, N, S, D), key and value of the new tokens, which stand in pages already; answers (1, S, N, V) in the query's dtype.
    KtoptError for what it doesn't compute."""
    batch = running.batch
    if batch is None:
        raise KtoptError(f"the attention implementation {NAME} runs in forward_paged alone")
    scale, window = scale_and_window(NAME, module, query.shape[-1], scaling, sliding_window, is_causal, others)
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    if batch.probing:
        return out.zero_(), None
    for piece in range(len(batch.sequences)):
        rows = batch.rows_of(piece)
        out[0, rows] = _attend(batch, module.layer_idx, piece, query[0, :, rows], scale, window)  # type: ignore[arg-type]
    return out, None


def _attend(batch: PagedBatch, layer: int, piece: int, query_NSD: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """One sequence: (S, N, V)."""
    past, tokens = int(batch.pasts[piece]), query_NSD.shape[1]
    begin = max(0, past + 1 - window) if window else 0
    keys, values = (each.to(query_NSD.dtype) for each in batch.read(layer, piece, begin))
    own = torch.arange(past, past + tokens, device=query_NSD.device)[:, None]
    at = torch.arange(begin, past + tokens, device=query_NSD.device)
    seen = (at <= own) & (at > own - window if window else True)
    out = torch.nn.functional.scaled_dot_product_attention(
        query_NSD[None], keys[None], values[None], attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
