"""What transformers' attention masks say, where it is no more than causality, a window, and padding before each sequence.

Legend: B sequences, S queries, N keys.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch

_recent: list[tuple[Any, ...]] = [(None, lambda: None, (), 0)] * 2
"""Masks looked at last: the step, the mask (weakly), what was asked, and the answer. All layers of a step are given the same one,
or one of two by turns."""
ROWS = 256
"""Queries whose rows of a mask are looked at together: a long prompt's mask is large, and so is what comes of comparing it."""


def first_tokens(
    mask: torch.Tensor, batch: int, queries: int, past: int, window: int, step: Any = None
) -> torch.Tensor | int | str:
    """The first token in memory that each sequence sees, int64 (B), or 0 where all see all; or why the mask can't be told so.

    mask     (B or 1, 1, S, N), bool with True for what is seen, or floats with 0 for what is seen; or (B or 1, N), True for tokens
             that are no padding
    batch, queries  B and S
    past     tokens in memory before the queries; N may be fewer than past + S where a window has closed over the oldest
    window   tokens that a query sees, its own included; 0 for all
    step     an object that each forward of a model has anew (its position embeddings): within one, a mask is looked at once
    """
    about = (batch, queries, past, window)
    if step is not None:
        for then, known, asked, answer in _recent:
            if then is step and known() is mask and asked == about:
                return answer  # type: ignore[no-any-return]
    answer = _first_tokens(mask, queries, past, window)
    if isinstance(answer, torch.Tensor):
        answer = answer.expand(batch).contiguous() if len(answer) in (1, batch) else "an attention mask for other sequences"
    if step is not None:
        _recent[:] = [(step, weakref.ref(mask), about, answer), _recent[0]]
    return answer


def _first_tokens(mask: torch.Tensor, queries: int, past: int, window: int) -> torch.Tensor | int | str:
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return _first_unpadded(mask, queries, past, window)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != queries:
        return "an attention mask of another shape"
    covered = mask.shape[3]
    behind = past + queries - covered  # tokens in memory that the mask leaves out, because none of the queries sees them
    if behind < 0 or (behind and not window):
        return "an attention mask for more or fewer tokens than the cache holds"
    blocks = [slice(row, row + ROWS) for row in range(0, queries, ROWS)]
    if not mask.is_floating_point() and mask.dtype is not torch.bool:
        return f"an attention mask of {mask.dtype}"
    if any(_seen(mask[:, 0, rows]) is None for rows in blocks):
        return "an attention mask that weakens scores"
    padded = torch.stack([_padding(mask[:, 0, rows], covered - queries + rows.start, window) for rows in blocks]).amax(dim=0)
    if not all(_as_told(mask[:, 0, rows], covered - queries + rows.start, window, padded) for rows in blocks):
        return "an attention mask that is more than causality and padding"
    if not bool(padded.any()):
        return 0
    return torch.where(padded > 0, padded + behind, 0).to(torch.int64).contiguous()


def _first_unpadded(mask_BN: torch.Tensor, queries: int, past: int, window: int) -> torch.Tensor | int | str:
    """The same for a mask of padding alone. What stands behind a sequence is padding, too, among the queries themselves: those
    before them don't see it."""
    behind = past + queries - mask_BN.shape[1]
    if behind < 0 or (behind and not window):
        return "an attention mask for more or fewer tokens than the cache holds"
    there = mask_BN.bool()
    numbers = torch.arange(there.shape[1], device=there.device)
    none = ~there.any(dim=1)
    first = there.byte().argmax(dim=1).masked_fill(none, there.shape[1])
    last = there.shape[1] - there.flip(1).byte().argmax(dim=1).masked_fill(none, 0)
    whole = (numbers >= first[:, None]) & (numbers < last[:, None])
    if bool((whole != there).any()) or bool(((last < there.shape[1] - queries) & ~none).any()):
        return "padding between tokens"
    if not bool(first.any()):
        return 0
    return torch.where(first > 0, first + behind, 0).to(torch.int64).contiguous()


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """What a mask lets be seen; None where it weakens a score without hiding it."""
    if mask.dtype is torch.bool:
        return mask
    seen = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return seen if bool((seen | hidden).all()) else None


def _least(own: torch.Tensor, window: int) -> torch.Tensor:
    """The first key that the window leaves to each query."""
    return (own + 1 - window).clamp(min=0) if window else torch.zeros_like(own)


def _padding(mask_BSN: torch.Tensor, first_own: int, window: int) -> torch.Tensor:
    """(B): the tokens that rows of a mask leave out at a sequence's beginning, as far as these rows tell: a query that sees nothing
    is among them. Query 0's own token is `first_own`."""
    seen = cast(torch.Tensor, _seen(mask_BSN))
    own = torch.arange(first_own, first_own + seen.shape[1])
    first = torch.where(seen.any(dim=2), seen.byte().argmax(dim=2), own + 1)
    return torch.where((first > _least(own, window)) & (first <= own + 1), first, 0).amax(dim=1)


def _as_told(mask_BSN: torch.Tensor, first_own: int, window: int, padded: torch.Tensor) -> bool:
    """Whether rows of a mask are causality, the window, and so many tokens of padding, whose own rows see nothing, or all."""
    seen = cast(torch.Tensor, _seen(mask_BSN))
    own = torch.arange(first_own, first_own + seen.shape[1]).view(1, -1, 1)
    keys = torch.arange(seen.shape[2])
    start = torch.maximum(padded.view(-1, 1, 1), _least(own, window))
    told = ((keys >= start) & (keys <= own)) == seen
    blank = (seen.all(dim=2) | ~seen.any(dim=2)) & (own[..., 0] < padded.view(-1, 1))
    return bool((told | blank.unsqueeze(2)).all())
