"""Parts read from disk into slots: those side by side together, several at a time.

Where there are kernels (kernels/cpu/block_io.py), one call reads and verifies all parts of a fetch; a thread makes it for those
that aren't waited for yet. Elsewhere threads read a run after the other.

Legend: L layers, R rows, M blocks at most, S some parts of a layer.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ktopt.cache.blocks.disk import DiskTier, buffer_bytes
from ktopt.cache.blocks.pools import Pools

log = logging.getLogger(__name__)

CACHED_SHARE = 8
"""Runs for which it is worth while to wake another thread where they probably lie in the page cache."""
DIRECT_SHARE = 2
"""The same where the disk is waited for."""
ENDS, ENDED = -2, "the file ends early"
"""What the kernels say of a file without the bytes that it should have, and what a user is told."""
AHEAD = 96
"""Parts that are read ahead by one call, which whoever needs one of them waits for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Parts of one layer by block, and by row within it, and the slots that they go into: all int64 (S,)."""

    layer: int
    blocks_S: NDArray[np.int64]
    rows_S: NDArray[np.int64]
    slots_S: NDArray[np.int64]

    @classmethod
    def of(cls, parts_S: NDArray[np.int64], slots_S: NDArray[np.int64], rows: int, max_blocks: int) -> Wanted:
        """Of parts in any order, as a store numbers them."""
        rows_S, blocks_S = np.divmod(parts_S, max_blocks)
        layer = int(rows_S[0]) // rows
        rows_S -= layer * rows
        order = np.argsort(blocks_S * rows + rows_S)
        return cls(layer, blocks_S[order], rows_S[order], slots_S[order])

    def __len__(self) -> int:
        return len(self.slots_S)

    def __getitem__(self, some: slice) -> Wanted:
        return Wanted(self.layer, self.blocks_S[some], self.rows_S[some], self.slots_S[some])

    @property
    def apart_S(self) -> NDArray[np.bool_]:
        """Whether a part, from the second on, doesn't stand beside the one before it."""
        apart: NDArray[np.bool_] = (np.diff(self.blocks_S) != 0) | (np.diff(self.rows_S) != 1)
        return apart

    @property
    def runs(self) -> list[Wanted]:
        """Those side by side."""
        starts = [0, *(np.flatnonzero(self.apart_S) + 1).tolist(), len(self)]
        return [self[start:end] for start, end in pairwise(starts)]


class Readers:
    """Read parts of `disk` into slots of `pools`."""

    def __init__(self, disk: DiskTier, pools: Pools) -> None:
        self._disk, self._pools = disk, pools
        self._kernel = disk.read_parts
        threads = 1 if self._kernel else disk.readers
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ktopt-read")
        self._buffers: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._piece_bytes = buffer_bytes(disk.shape)
        size = self._piece_bytes * (disk.readers if self._kernel else 1)
        for _ in range(threads + 1):  # the caller of `read` reads too
            self._buffers.put(memoryview(mmap.mmap(-1, size)) if disk.direct else None)

    def read(self, wanted: Wanted) -> None:
        """All of them, now. KtoptError where one can't be read; the others have been read or not."""
        if self._kernel:
            self._read_together(wanted, self._kernel)
            return
        mine, *rest = self._shares(wanted.runs, self._disk.readers + 1)
        others = [self._pool.submit(self._read, some) for some in rest]
        try:
            self._read(mine)
        finally:
            errors = finished(others)
        for error in errors:
            if error is not None:
                raise error

    def start(self, wanted: Wanted) -> list[tuple[Future[None], NDArray[np.int64]]]:
        """Begin to read them; the reads, and the slots that each fills."""
        if self._kernel:
            some = [wanted[at : at + AHEAD] for at in range(0, len(wanted), AHEAD)]
            return [(self._pool.submit(self._read_together, each, self._kernel), each.slots_S) for each in some]
        shares = self._shares(wanted.runs, self._disk.readers)
        return [(self._pool.submit(self._read, runs), np.concatenate([run.slots_S for run in runs])) for runs in shares]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _shares(self, runs: list[Wanted], threads: int) -> list[list[Wanted]]:
        """For so many threads, or for fewer where there isn't enough to read."""
        each = max(-(-len(runs) // threads), DIRECT_SHARE if self._disk.direct else CACHED_SHARE)
        return [runs[at : at + each] for at in range(0, len(runs), each)]

    def _read(self, runs: list[Wanted]) -> None:
        buffer = self._buffers.get()
        try:
            for run in runs:
                memory = [self._pools.memory(slot) for slot in run.slots_S.tolist()]
                self._disk.read(run.layer, int(run.blocks_S[0]), int(run.rows_S[0]), memory, buffer)
        finally:
            self._buffers.put(buffer)

    def _read_together(self, wanted: Wanted, kernel: Callable[..., tuple[int, int]]) -> None:
        disk, shape = self._disk, self._disk.shape
        blocks = wanted.blocks_S.tolist()
        handles = disk.files_of(wanted.layer, blocks)
        files_S = np.array([handles[block].fd for block in blocks], dtype=np.int64)
        offsets_S = shape.offset(wanted.layer, 0) + wanted.rows_S * shape.layout.nbytes
        expected_S = disk.checksums_LRM[wanted.layer, wanted.rows_S, wanted.blocks_S]
        buffer = self._buffers.get()
        try:
            at, error = kernel(
                shape.layout.nbytes, wanted.layer, shape.seed, files_S, wanted.blocks_S, wanted.rows_S, offsets_S,
                self._pools.addresses(wanted.slots_S), expected_S, buffer, self._piece_bytes,
            )  # fmt: skip
        finally:
            self._buffers.put(buffer)
        if at >= 0:
            raise disk.lost(wanted.layer, blocks[at], os.strerror(error) if error > 0 else ENDED if error == ENDS else None)
        disk.drop_pages([handle.fd for handle in handles.values()])


def finished(reads: list[Future[None]]) -> list[BaseException | None]:
    """The errors of reads, when all have ended: an interrupt waits too, since they write into slots."""
    while True:
        try:
            return [read.exception() for read in reads]
        except KeyboardInterrupt:
            log.info("waiting for the disk before the interrupt is followed")
