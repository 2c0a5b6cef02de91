"""What transformers' attention masks say, where it is no more than causality, a window, and padding before each sequence.

Legend: B sequences, S queries, N keys.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_last: list[Any] = [None, (), None, 0]
"""The mask that was last looked at (a weak reference), with what, a copy where changes to it aren't counted, and the answer: all
layers of a step are given the same one."""


def first_tokens(mask: torch.Tensor, queries: int, past: int, window: int) -> torch.Tensor | int | str:
    """The first token in memory that each sequence sees, int64 (B), or 0 where all see all; or why the mask can't be told so.

    mask     (B or 1, 1, S, N), bool with True for what is seen, or floats with 0 for what is seen
    queries  S
    past     tokens in memory before the queries; N may be fewer than past + S where a window has closed over the oldest
    window   tokens that a query sees, its own included; 0 for all
    """
    uncounted = mask.is_inference()
    about = (queries, past, window, mask.data_ptr(), None if uncounted else mask._version)
    held, known, copy, answer = _last
    if held is not None and held() is mask and known == about and (copy is None or torch.equal(copy, mask)):
        return answer  # type: ignore[no-any-return]
    answer = _first_tokens(mask, queries, past, window)
    _last[:] = [weakref.ref(mask), about, mask.clone() if uncounted else None, answer]
    return answer


def _first_tokens(mask: torch.Tensor, queries: int, past: int, window: int) -> torch.Tensor | int | str:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != queries:
        return "an attention mask of another shape"
    covered = mask.shape[3]
    behind = past + queries - covered  # tokens in memory that the mask leaves out, because none of the queries sees them
    if behind < 0 or (behind and not window):
        return "an attention mask for more or fewer tokens than the cache holds"
    seen = mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] == 0
    own = torch.arange(covered - queries, covered).view(1, -1, 1)
    keys = torch.arange(covered).view(1, 1, -1)
    first = seen.int().argmax(dim=2).masked_fill(~seen.any(dim=2), covered)  # (B, S): the first key that a query sees
    least = (own[..., 0] + 1 - window).clamp(min=0) if window else torch.zeros_like(own[..., 0])
    padded = torch.where(first > least, first, 0).masked_fill(first > own[..., 0], 0).amax(dim=1)
    start = torch.maximum(padded.view(-1, 1, 1), least.unsqueeze(2))
    expected = (keys >= start) & (keys <= own)
    told = (expected == seen) | (own < padded.view(-1, 1, 1))  # what padding sees is nobody's concern
    if not bool(told.all()):
        return "an attention mask that is more than causality and padding"
    if not bool(padded.any()):
        return 0
    return torch.where(padded > 0, padded + behind, 0).to(torch.int64).contiguous()
