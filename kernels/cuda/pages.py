"""What each row attends to as FlashInfer's paged attention takes it: a memory cut into pages, and which of them are a row's.

Pages are views of the memory as it lies; nothing is copied. They are as long as they may be for every row's first seen token to
begin one, and no longer than MOST_TOKENS.

Legend: R rows (a KV head of a sequence), K blocks of a row, D numbers of a key and of a value, C tokens of a cache, P pages of a
memory, N numbers of a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ktopt.kernels.cuda.slots import SlotSegments
from ktopt.kernels.segments import CacheSegments

MOST_TOKENS = 128
"""FlashInfer shares a row out among processors by whole pages."""


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """A memory in pages (P, tokens, 1, D), and how many of them each row has: at least one, since FlashInfer promises nothing for
    none.

    last_R    tokens of each row's last page
    empty_R   rows that see nothing: their one page is for the form
    indices   makes the pages of all rows after one another, int32 on the device
    content   equal where `indices` would make the same; None: nothing tells
    """

    keys: torch.Tensor
    values: torch.Tensor
    counts_R: tuple[int, ...]
    last_R: tuple[int, ...]
    empty_R: tuple[int, ...]
    indices: Callable[[], torch.Tensor]
    content: Any = None


def pages_of(part: SlotSegments | CacheSegments) -> Pages | None:
    """None where no row sees anything."""
    return _pool_pages(part) if isinstance(part, SlotSegments) else _cache_pages(part)


def _pool_pages(part: SlotSegments) -> Pages | None:
    """A slot is some pages of keys and as many of values. So views of the same pool have a block's keys and values at one index."""
    (rows, count), hidden_RK = part.slots_RK.shape, part.hidden_RK
    if not count or (hidden_RK is not None and bool((hidden_RK >= part.block_tokens).all())):
        return None
    tokens = math.gcd(MOST_TOKENS, part.block_tokens, *(() if hidden_RK is None else hidden_RK.flatten().tolist()))
    each = part.block_tokens // tokens
    pages = part.pool_SN.view(-1, tokens, 1, part.key_dim)
    keys, values = pages[:-each], pages[each:]

    def all_pages() -> torch.Tensor:
        first = part.slots_RK.int() * (2 * each)
        return (first[:, :, None] + torch.arange(each, dtype=torch.int32, device=first.device)).flatten()

    if hidden_RK is None:
        return Pages(keys, values, (count * each,) * rows, (tokens,) * rows, (), all_pages)
    keep = (torch.arange(each) >= (hidden_RK // tokens)[:, :, None]).flatten(1)
    empty_R = tuple((~keep.any(1)).nonzero().flatten().tolist())
    keep[list(empty_R), 0] = True
    places = keep.flatten().nonzero().flatten()
    last_R = tuple(1 if row in empty_R else tokens for row in range(rows))

    def some_pages() -> torch.Tensor:
        return all_pages()[places.to(part.slots_RK.device, non_blocking=True)].clamp_(min=0)

    return Pages(keys, values, tuple(keep.sum(1).tolist()), last_R, empty_R, some_pages)


def _cache_pages(part: CacheSegments) -> Pages | None:
    """Tokens of a cache whose rows lie at equal distances."""
    (rows, capacity, dim), end = part.keys_RCD.shape, part.end
    hidden = [0] * rows if part.hidden_RK is None else part.hidden_RK.flatten().tolist()
    begins = [part.begin + number for number in hidden]
    if min(begins, default=end) >= end:
        return None
    row_tokens = part.keys_RCD.stride(0) // dim if rows > 1 else capacity
    tokens = math.gcd(MOST_TOKENS, capacity, row_tokens, *(begin for begin in begins if begin < end))
    stop = -(-end // tokens)
    spans = [range(begin // tokens, stop) if begin < end else range(1) for begin in begins]
    last_R = tuple(end - (stop - 1) * tokens if begin < end else 1 for begin in begins)

    def indices() -> torch.Tensor:
        pages = [page + row * row_tokens // tokens for row, span in enumerate(spans) for page in span]
        return torch.tensor(pages, dtype=torch.int32).to(part.keys_RCD.device, non_blocking=True)

    def paged(numbers: torch.Tensor) -> torch.Tensor:
        total = ((rows - 1) * row_tokens + capacity) // tokens
        return numbers.as_strided((total, tokens, 1, dim), (tokens * dim, dim, dim, 1))

    return Pages(
        paged(part.keys_RCD),
        paged(cast(torch.Tensor, part.values_RCV)),
        tuple(len(span) for span in spans),
        last_R,
        tuple(row for row, begin in enumerate(begins) if begin >= end),
        indices,
        (row_tokens, tokens, tuple(begins), end),
    )
