"""Where each part of a cache is: in which slot of memory, on disk, or nowhere.

Legend: L layers, R rows of a layer, M blocks at most, P = L*R*M parts, numbered in this order; S some of them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ktopt.cache.blocks.eviction import Warmth
from ktopt.cache.blocks.pools import NOBODY, Pools

KNOWN = 1
"""Has been put and not been forgotten."""
ON_DISK = 2
COMING = 4
"""Is being read from disk into a slot."""
KEPT = 8
"""Stays where it is, for as long as others are taken out."""
PART_INDEX_BYTES = 8 + 1 + 4
"""What a part's address, state and warmth take."""
SHARE_AT_ONCE = 128
"""Looking for the coldest costs a pass over all slots, so one slot of so many is emptied at a time."""


class Residency:
    """`addresses` (L, R, M) is for kernels to read: int64, 0 where a part is in no memory."""

    def __init__(self, layers: int, rows: int, max_blocks: int, pools: Pools) -> None:
        with torch.inference_mode(False):
            self.addresses = torch.zeros(layers, rows, max_blocks, dtype=torch.int64)
        self.addresses_P: NDArray[np.int64] = self.addresses.numpy().reshape(-1)
        self.state_P = np.zeros(layers * rows * max_blocks, dtype=np.uint8)
        self.warmth = Warmth(layers, rows * max_blocks)
        self.pools = pools
        self.evictions = 0

    def settle(self, parts_S: NDArray[np.int64], slots_S: NDArray[np.int64]) -> None:
        """These parts are in these slots now, ready to be read."""
        self.addresses_P[parts_S] = self.pools.addresses(slots_S)

    def drop(self, parts_S: NDArray[np.int64]) -> None:
        """Take parts out of memory, those of them that are there."""
        addresses_S = self.addresses_P[parts_S]
        there_S = addresses_S != 0
        self.addresses_P[parts_S] = 0  # first: an interrupt never leaves the address of a slot that is another's
        self.pools.give_back(self.pools.slots_at(addresses_S[there_S]))

    def forget(self, parts_S: NDArray[np.int64]) -> None:
        self.drop(parts_S)
        self.state_P[parts_S] = 0

    def make_room(self, count: int, kept_parts: NDArray[np.int64]) -> bool:
        """Have `count` free slots, taking out the coldest parts that disk has too, not `kept_parts`. False where it can't."""
        missing = count - self.pools.free
        if missing <= 0:
            return True
        candidates_S = self._evictable(kept_parts)
        if len(candidates_S):
            wanted = min(max(missing, self.pools.slots // SHARE_AT_ONCE), len(candidates_S))
            self.drop(candidates_S[self.warmth.coldest(candidates_S, wanted)])
            self.evictions += wanted
        return self.pools.free >= count

    def _evictable(self, kept_parts: NDArray[np.int64]) -> NDArray[np.int64]:
        owners = self.pools.owner
        parts_S = owners[owners != NOBODY]
        self.state_P[kept_parts] |= KEPT
        free_to_go = (self.state_P[parts_S] & (ON_DISK | COMING | KEPT)) == ON_DISK
        self.state_P[kept_parts] &= ~np.uint8(KEPT)
        evictable_S: NDArray[np.int64] = parts_S[free_to_go]
        return evictable_S
