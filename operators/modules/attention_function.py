"""The attention implementation "ktopt_blocks" of transformers' attention interface, and its masks, which are never quadratic: none,
or the 2-D mask of padding.

A module with KDynamicAttention hands its layer of the cache over; for others, keys and values are at hand whole, and are attended
to tile by tile.

Legend: B sequences, S queries, N query heads, G heads of keys, X keys, D numbers of a key, V of a value.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ktopt.cache.attention_asked import scale_and_window
from ktopt.diagnostics import KtoptError
from ktopt.kernels.blocks import attend_tile
from ktopt.operators.modules.masks import first_tokens

NAME = "ktopt_blocks"


class AtHand(threading.local):
    """The module whose forward runs, and the layer of its cache: of each thread its own, since several may run one model."""

    module: torch.nn.Module | None = None
    layer: Any = None


at_hand = AtHand()


def register() -> None:
    """Make the implementation known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> torch.Tensor | None:
    """None where only causality and a window hide tokens, (B, kv_length) bool where padding does, too. What else a model may ask
    for (packed sequences, tokens that see later ones, caches with room behind their tokens) is told by transformers' own mask."""
    behind = isinstance(q_offset, int) and kv_offset + kv_length == q_offset + q_length
    if not behind or (q_length > 1 and not allow_is_causal_skip):
        from transformers.masking_utils import sdpa_mask

        whole: torch.Tensor | None = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            attention_mask=attention_mask, allow_is_causal_skip=False, **others,
        )  # fmt: skip
        return whole
    if attention_mask is None:
        return None
    padding = attention_mask[:, -kv_length:]
    return None if padding.shape[1] == kv_length and bool(padding.all()) else padding


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
    """query (B, N, S, D), key (B, G, X, D), value (B, G, X, V), of new tokens alone where the module's cache keeps blocks; answers
    (B, S, N, V) in the query's dtype. KtoptError for what it doesn't compute."""
    scale, window = scale_and_window(NAME, module, query.shape[-1], scaling, sliding_window, is_causal, others)
    held = at_hand.layer
    if held is not None and at_hand.module is module:
        from ktopt.operators.modules.block_attention import attend_blocks

        starts_B = starts_of(attention_mask, query.shape[0], query.shape[2], held.get_seq_length(), 0)
        return attend_blocks(held, query, (key, value), scale, starts_B).to(query.dtype), None
    whole = attention_mask is not None and attention_mask.dim() == 4
    if whole or dropout or (torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))):
        return _by_torch(query, key, value, attention_mask, window, scale, dropout), None
    starts_B = starts_of(attention_mask, query.shape[0], query.shape[2], key.shape[2] - query.shape[2], window)
    return _by_tiles(query, key, value, starts_B, window, scale), None


def starts_of(mask: Any, batch: int, queries: int, past: int, window: int) -> torch.Tensor | None:
    """Each sequence's first token that is no padding; None where there is none. KtoptError for a mask that says more."""
    if mask is None:
        return None
    starts = first_tokens(mask, batch, queries, past, window, mask)
    if isinstance(starts, str):
        raise KtoptError(
            f"attention over blocks sees tokens up to its own, from the first that is no padding, and this is {starts}"
        )
    return None if isinstance(starts, int) else starts


def _by_tiles(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts_B: torch.Tensor | None, window: int, scale: float
) -> torch.Tensor:
    """Keys and values as they are, by a kernel that keeps no scores."""
    first = key.shape[2] - query.shape[2]
    outs = []
    for row in range(len(query)):
        start = 0 if starts_B is None else int(starts_B[row])
        q_SND = query[row].transpose(0, 1).float().contiguous()
        keys, values = (each[row] if each[row, :1].is_contiguous() else each[row].contiguous() for each in (key, value))
        outs.append(attend_tile(q_SND, keys, values, first=first, start=start, window=window, scale=scale)[0])
    return torch.stack(outs).to(query.dtype)


def _by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    window: int,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """With gradients, dropout, or a mask of anything: torch's own, under a whole mask."""
    queries, keys = query.shape[2], key.shape[2]
    own = torch.arange(keys - queries, keys, device=query.device)[:, None]
    position = torch.arange(keys, device=query.device)
    seen = (position <= own) & (position > own - window if window else True)
    if mask is not None:
        seen = mask if mask.dim() == 4 else seen & mask.bool()[:, None, None, :]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, dropout_p=dropout, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous()
