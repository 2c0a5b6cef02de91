"""Parts read from disk into slots: those side by side together, several at a time by threads.

Legend: L layers, R rows, M blocks at most, S some parts of a layer.
"""

from __future__ import annotations

import logging
import mmap
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ktopt.cache.blocks.disk import DiskTier, buffer_bytes

log = logging.getLogger(__name__)

CACHED_SHARE = 8
"""Runs for which it is worth while to wake another thread where they probably lie in the page cache."""
DIRECT_SHARE = 2
"""The same where the disk is waited for."""


@dataclass(frozen=True, slots=True)
class Run:
    """Parts of one layer and block, of rows side by side, and the slots that they go into."""

    layer: int
    block: int
    first_row: int
    slots: list[int]


def runs_of(parts_S: NDArray[np.int64], slots_S: NDArray[np.int64], rows: int, max_blocks: int) -> list[Run]:
    """Parts of one layer, in any order, as few runs."""
    blocks_S, rows_S = parts_S % max_blocks, parts_S // max_blocks % rows
    order = np.lexsort((rows_S, blocks_S))
    blocks_S, rows_S, slots_S = blocks_S[order], rows_S[order], slots_S[order]
    apart = (np.diff(blocks_S) != 0) | (np.diff(rows_S) != 1)
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1, [len(parts_S)])).tolist()
    layer = int(parts_S[0]) // (rows * max_blocks)
    return [Run(layer, int(blocks_S[start]), int(rows_S[start]), slots_S[start:end].tolist()) for start, end in pairwise(starts)]


class Readers:
    """Threads that read. `memory` gives a slot's bytes."""

    def __init__(self, disk: DiskTier, memory: Callable[[int], memoryview]) -> None:
        self._disk = disk
        self._memory = memory
        self._pool = ThreadPoolExecutor(disk.readers, thread_name_prefix="ktopt-read")
        self._buffers: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        for _ in range(disk.readers + 1):  # the caller of `read` reads too
            self._buffers.put(memoryview(mmap.mmap(-1, buffer_bytes(disk.shape))) if disk.direct else None)

    def read(self, runs: list[Run]) -> None:
        """All of them, now. KtoptError where one can't be read; the others have been read or not."""
        mine, *rest = self.shares(runs, self._disk.readers + 1)
        others = [self.start(some) for some in rest]
        try:
            self._read(mine)
        finally:
            errors = finished(others)
        for error in errors:
            if error is not None:
                raise error

    def shares(self, runs: list[Run], threads: int) -> list[list[Run]]:
        """For so many threads, or for fewer where there isn't enough to read."""
        each = max(-(-len(runs) // threads), DIRECT_SHARE if self._disk.direct else CACHED_SHARE)
        return [runs[at : at + each] for at in range(0, len(runs), each)]

    def start(self, runs: list[Run]) -> Future[None]:
        """Begin to read them, one after the other."""
        return self._pool.submit(self._read, runs)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, runs: list[Run]) -> None:
        buffer = self._buffers.get()
        try:
            for run in runs:
                self._disk.read(run.layer, run.block, run.first_row, [self._memory(slot) for slot in run.slots], buffer)
        finally:
            self._buffers.put(buffer)


def finished(reads: list[Future[None]]) -> list[BaseException | None]:
    """The errors of reads, when all have ended: an interrupt waits too, since they write into slots."""
    while True:
        try:
            return [read.exception() for read in reads]
        except KeyboardInterrupt:
            log.info("waiting for the disk before the interrupt is followed")
