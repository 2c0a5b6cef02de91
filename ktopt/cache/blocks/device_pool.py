"""A GPU's pool of blocks: copies of parts that a store keeps in main memory or on disk, unpacked into float16 or bfloat16.

A part of a block (what one row of one layer keeps of it) never changes, so a copy is dropped without being written back. The least
recently used goes first. Copies are made on a stream of their own, from pinned memory, beside what the device computes meanwhile;
`bring` makes the device's current stream wait for those that it needs.

One thread calls a pool. Legend: L layers, R rows, M blocks at most, K picks of a row, S some parts or slots, B bytes of a part, N
numbers of one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktopt.cache.blocks.layout import BlockLayout
from ktopt.cache.blocks.statistics import megabytes
from ktopt.diagnostics import KtoptError

STAGED_BYTES = 2 << 20
"""What is copied to the device at a time. There are two such buffers: one is filled while the other is copied."""
UNPACKING = 12
"""What a part's bytes take on the device while they are unpacked, in times of them: float32 twice, and halves twice."""
NOWHERE = -1

Fetch = Callable[[torch.Tensor], torch.Tensor]
"""Picks (R, K) of a layer to addresses (R, K) of their bytes in main memory, as BlockStore.fetch."""
Unpack = Callable[[torch.Tensor], torch.Tensor]
"""Blocks' bytes on the device, uint8 (S, B), to their numbers (S, N) in the pool's dtype."""


@dataclass(slots=True)
class PoolStatistics:
    """Counts are of parts."""

    hits: int = 0
    """Asked for and there."""
    copied: int = 0
    """Brought to the device."""
    copied_bytes: int = 0
    """As they lie in main memory."""
    evictions: int = 0
    held_bytes: int = 0
    """On the device now."""


class DevicePool:
    """Slots for parts of `layout`, as many as `nbytes` hold but no more than there are parts: `pool_SN`, on `device`.

    unpack        makes a part's numbers of its bytes, on the device
    fetch_blocks  how many blocks of a row are asked for at once, at most. KtoptError where the pool doesn't hold them
    """

    def __init__(
        self,
        layout: BlockLayout,
        layers: int,
        rows: int,
        max_blocks: int,
        *,
        nbytes: int,
        device: torch.device,
        unpack: Unpack,
        dtype: torch.dtype = torch.float16,
        fetch_blocks: int = 1,
    ) -> None:
        self.layout, self.rows, self.max_blocks, self.device = layout, rows, max_blocks, device
        numbers = slot_numbers(layout)
        self._slot_bytes = numbers * dtype.itemsize
        parts = layers * rows * max_blocks
        self._staged = staged(layout, parts)
        self.slots = min((nbytes - unpacking_bytes(layout, parts)) // self._slot_bytes, parts)
        step = rows * min(fetch_blocks, max_blocks)
        if self.slots < step:
            raise KtoptError(
                f"one layer's step needs {megabytes(step * self._slot_bytes + unpacking_bytes(layout, parts))} on {device}, for "
                f"{fetch_blocks} blocks of {rows} rows unpacked, and there is {megabytes(max(nbytes, 0))} for it: raise "
                "gpu_memory_size_GB, or select fewer blocks"
            )
        with torch.inference_mode(False):
            self.pool_SN = torch.zeros(self.slots, numbers, dtype=dtype, device=device)
        self._unpack = unpack
        self._copies = _Copies(self._staged, layout.nbytes, device)
        self._first_parts_LR1 = np.arange(layers * rows, dtype=np.int64).reshape(layers, rows, 1) * max_blocks
        self._slot_P = np.full(parts, NOWHERE, dtype=np.int32)
        self._owner_S = np.full(self.slots, NOWHERE, dtype=np.int64)
        self._used_S = np.zeros(self.slots, dtype=np.int64)
        self._now = 0
        self._counts = PoolStatistics()

    def bring(self, layer: int, picks_RK: torch.Tensor, fetch: Fetch) -> torch.Tensor:
        """Slots (R, K) int32, on the device, of what each row of a layer has picked (on the CPU). They hold until the next call.
        KtoptError as `fetch`, and where more is asked for than there are slots."""
        parts_RK = picks_RK.numpy() + self._first_parts_LR1[layer]
        self._now += 1
        there = self._slot_P[parts_RK] != NOWHERE
        self._counts.hits += int(np.count_nonzero(there))
        if not there.all():
            self._load(layer, picks_RK.numpy(), there, fetch)
        slots_RK = self._slot_P[parts_RK]
        self._used_S[slots_RK] = self._now
        self._copies.wait()
        return torch.from_numpy(slots_RK).to(self.device, non_blocking=True)

    def truncate(self, blocks: int) -> None:
        """Forget the blocks from `blocks` on, in all layers."""
        parts_P = (self._first_parts_LR1 + np.arange(blocks, self.max_blocks)).reshape(-1)
        slots_S = self._slot_P[parts_P]
        slots_S = slots_S[slots_S != NOWHERE]
        self._slot_P[parts_P] = NOWHERE
        self._owner_S[slots_S] = NOWHERE
        self._used_S[slots_S] = 0

    @property
    def statistics(self) -> PoolStatistics:
        self._counts.held_bytes = int(np.count_nonzero(self._owner_S != NOWHERE)) * self._slot_bytes
        return self._counts

    def _load(self, layer: int, picks_RK: NDArray[Any], there_RK: NDArray[np.bool_], fetch: Fetch) -> None:
        """Bring in the picks that aren't there."""
        first_R1 = self._first_parts_LR1[layer]
        self._used_S[self._slot_P[(picks_RK + first_R1)[there_RK]]] = self._now
        wanted_RW = _missing(picks_RK, there_RK)
        addresses_RW = fetch(torch.from_numpy(wanted_RW)).numpy()
        parts_S, places_S = np.unique(wanted_RW + first_R1, return_index=True)
        absent_S = self._slot_P[parts_S] == NOWHERE  # rows with less missing are filled up with what is there
        parts_S, addresses_S = parts_S[absent_S], addresses_RW.reshape(-1)[places_S[absent_S]]
        slots_S = self._take(parts_S)
        for at in range(0, len(parts_S), self._staged):
            some = slice(at, at + self._staged)
            with self._copies.of(addresses_S[some]) as raw_SB:
                to = torch.from_numpy(slots_S[some]).to(self.device, non_blocking=True)
                self.pool_SN.index_copy_(0, to, self._unpack(raw_SB))
        self._counts.copied += len(parts_S)
        self._counts.copied_bytes += len(parts_S) * self.layout.nbytes

    def _take(self, parts_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots for these parts: free ones, and else those that were used the longest ago, not now."""
        count = len(parts_S)
        if count > int(np.count_nonzero(self._used_S < self._now)):
            raise KtoptError(
                f"a step's picks don't fit into the {self.slots} slots on {self.device}: raise gpu_memory_size_GB, or select fewer "
                "blocks"
            )
        slots_S = np.argpartition(self._used_S, count - 1)[:count].astype(np.int64)
        owners_S = self._owner_S[slots_S]
        owners_S = owners_S[owners_S != NOWHERE]
        self._slot_P[owners_S] = NOWHERE
        self._counts.evictions += len(owners_S)
        self._owner_S[slots_S] = parts_S
        self._slot_P[parts_S] = slots_S
        self._used_S[slots_S] = self._now
        return slots_S


def staged(layout: BlockLayout, parts: int) -> int:
    """How many of so many parts are copied at a time."""
    return max(1, min(STAGED_BYTES // layout.nbytes, parts))


def unpacking_bytes(layout: BlockLayout, parts: int) -> int:
    """What a pool for so many parts takes of its device beside the slots."""
    return UNPACKING * staged(layout, parts) * layout.nbytes


def slot_numbers(layout: BlockLayout) -> int:
    """N: of latents, keys alone."""
    return layout.tokens * (layout.key_dim + (0 if layout.shared else layout.value_dim))


def _missing(picks_RK: NDArray[Any], there_RK: NDArray[np.bool_]) -> NDArray[Any]:
    """What each row lacks (R, W), rows that lack less filled up with what they have anyway."""
    order_RK = np.argsort(there_RK, axis=1, kind="stable")
    width = int((~there_RK).sum(1).max())
    return np.ascontiguousarray(np.take_along_axis(picks_RK, order_RK, 1)[:, :width])


class _Copies:
    """Copies of parts' bytes from main memory to a device, `staged` of them at a time, on a stream of their own where there are
    streams."""

    def __init__(self, staged: int, part_bytes: int, device: torch.device) -> None:
        self._part_bytes, self._device = part_bytes, device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.inference_mode(False):
            self._memory = [torch.empty(staged, part_bytes, dtype=torch.uint8, pin_memory=bool(self._stream)) for _ in range(2)]
        self._done: list[Any] = [None, None]
        self._turn = 0

    @contextmanager
    def of(self, addresses_S: NDArray[np.int64]) -> Iterator[torch.Tensor]:
        """The bytes at these addresses on the device, uint8 (S, B). Work on them goes to the stream of copies, after what the
        current stream has been given: that may still read the slots that are filled anew."""
        self._turn = 1 - self._turn
        if (done := self._done[self._turn]) is not None:
            done.synchronize()
        memory_SB = self._memory[self._turn][: len(addresses_S)]
        base = memory_SB.data_ptr()
        for place, address in enumerate(addresses_S.tolist()):
            ctypes.memmove(base + place * self._part_bytes, address, self._part_bytes)
        if self._stream is None:
            yield memory_SB.to(self._device)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield memory_SB.to(self._device, non_blocking=True)
            self._done[self._turn] = self._stream.record_event()

    def wait(self) -> None:
        """Let the device's current stream wait for all copies that have begun."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
