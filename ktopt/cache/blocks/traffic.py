"""What moves between memory and disk, and the making of room for it: for the one thread that calls a store.

Threads read and write bytes of slots. Only the caller's thread changes what is known of parts, when it takes note of what they
have done.

Legend: R rows, M blocks at most, S some parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktopt.cache.blocks.disk import DiskTier
from ktopt.cache.blocks.reading import Readers, Wanted
from ktopt.cache.blocks.residency import COMING, ON_DISK, Residency
from ktopt.cache.blocks.statistics import CacheStatistics, megabytes
from ktopt.cache.blocks.writing import Job, WriteBehind
from ktopt.diagnostics import KtoptError

NONE = np.zeros(0, dtype=np.int64)


class Coming(NamedTuple):
    """A read that has begun, and the slots that it fills. `ahead`: of parts that nobody had asked for."""

    read: Future[None]
    slots_S: NDArray[np.int64]
    ahead: bool


class DiskTraffic:
    """Of one store. `close` ends its threads and removes the files."""

    def __init__(self, disk: DiskTier, residency: Residency, counts: CacheStatistics, max_blocks: int, step_parts: int) -> None:
        self._disk, self._residency, self._counts = disk, residency, counts
        self._rows, self._max_blocks, self._step_parts = disk.shape.rows, max_blocks, step_parts
        self._writer = WriteBehind(disk, residency.pools.memory)
        self._readers = Readers(disk, residency.pools)
        self._coming: list[Coming] = []
        self._pid = os.getpid()

    def write(self, layer: int, block: int, slots_R: list[int], *, begin: bool) -> None:
        """Write a layer of a block some time; with `begin` from now on."""
        self._writer.add(Job(layer, block, slots_R))
        if begin and not self._writer.begun:
            self._writer.begin()

    def check_process(self) -> None:
        """KtoptError in a process that was forked from this one's: it has none of the threads."""
        if os.getpid() != self._pid:
            raise KtoptError(
                f"this cache has blocks on disk, and belongs to process {self._pid}, from which this one was forked: begin a new "
                "cache here, or fork before there is one"
            )

    def make_room(self, count: int, kept_parts: NDArray[np.int64]) -> None:
        """Have `count` free slots beside those of `kept_parts`, if need be by waiting for the disk. KtoptError where it can't."""
        if self._residency.make_room(count, kept_parts):
            return
        self.take_note()
        with self._waiting():
            self._wait_for_room(count, kept_parts)

    def room_to_put(self) -> None:
        """Have slots for one more layer of a block. Parts that aren't written leave `step_parts` slots to others, so that a
        step can still be fetched when the disk takes no more. KtoptError where that can't be."""
        most = max(self._residency.pools.slots - self._step_parts, self._rows)
        if (self._writer.pending + 1) * self._rows > most:
            with self._waiting():
                while (self._writer.pending + 1) * self._rows > most:
                    if not self._wait():
                        raise KtoptError(self._full())
        self.make_room(self._rows, NONE)

    def bring(self, parts_S: NDArray[np.int64]) -> None:
        """Have all these parts of a layer in memory. KtoptError where one can't be read, or memory never holds so many."""
        pools = self._residency.pools
        if len(parts_S) > pools.slots and len(np.unique(parts_S)) > pools.slots:
            raise KtoptError(
                f"{len(parts_S):,} parts of a layer are asked for at a time, and memory holds {pools.slots:,} of all layers "
                f"({megabytes(pools.slots * pools.part_bytes)}): raise cpu_memory_size_GB, or select fewer blocks"
            )
        with self._waiting():
            while (self._residency.state_P[parts_S] & COMING).any():
                self._coming[0].read.exception()
                self.take_note()
            missing_S = np.unique(parts_S[self._residency.addresses_P[parts_S] == 0])
            if len(missing_S):
                self._wait_for_room(len(missing_S), parts_S)
                self._read(missing_S)

    def begin_reads(
        self, layer: int, parts_S: NDArray[np.int64], kept_parts: NDArray[np.int64], *, ahead: bool = True
    ) -> NDArray[np.int64]:
        """Begin to read those of these parts of a layer that lie on disk alone, as far as there is room beside `kept_parts`; which
        those are. `ahead`: before anybody has asked for them."""
        self.take_note()
        residency = self._residency
        on_disk_S = (residency.state_P[parts_S] & (ON_DISK | COMING)) == ON_DISK
        wanted_S: NDArray[np.int64] = parts_S[on_disk_S & (residency.addresses_P[parts_S] == 0)]
        if not residency.make_room(len(wanted_S), np.concatenate((kept_parts.reshape(-1), parts_S))):
            wanted_S = wanted_S[: residency.pools.free]
        if not len(wanted_S):
            return NONE
        slots_S = residency.pools.take(wanted_S)
        residency.state_P[wanted_S] |= COMING
        if ahead:
            residency.warmth.expect(layer, wanted_S)
        wanted = Wanted.of(wanted_S, slots_S, self._rows, self._max_blocks)
        self._coming += [Coming(*begun, ahead) for begun in self._readers.start(wanted)]
        self._counts.reads += 1 + int(np.count_nonzero(wanted.apart_S))
        return wanted_S

    def take_note(self) -> None:
        """Of what has been written and read in the meantime."""
        for job in self._writer.take_written():
            parts_R = (job.layer * self._rows + np.arange(self._rows)) * self._max_blocks + job.block
            self._residency.state_P[parts_R] |= ON_DISK
        coming, self._coming = self._coming, []
        for each in coming:
            if each.read.done():
                self._land(*each)
            else:
                self._coming.append(each)

    def flush(self) -> None:
        """Have everything on disk, durably. KtoptError where it doesn't take it."""
        done = self._writer.flush()
        self.take_note()
        if not done:
            raise KtoptError(f"not all blocks of the cache could be written: {self._disk_in_words()}")

    def truncate(self, blocks: int) -> None:
        for each in self._coming:
            each.read.exception()
        self._writer.truncate(blocks)
        self.take_note()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self._readers.close()
        self._writer.close()
        self._disk.close()

    def _read(self, missing_S: NDArray[np.int64]) -> None:
        pools = self._residency.pools
        slots_S = pools.take(missing_S)
        wanted = Wanted.of(missing_S, slots_S, self._rows, self._max_blocks)
        try:
            self._readers.read(wanted)
        except BaseException:
            pools.give_back(slots_S)
            raise
        self._residency.settle(missing_S, slots_S)
        self._counts.reads += 1 + int(np.count_nonzero(wanted.apart_S))
        self._counts.read_bytes += len(missing_S) * pools.part_bytes

    def _land(self, future: Future[None], slots_S: NDArray[np.int64], ahead: bool) -> None:
        pools = self._residency.pools
        parts_S = pools.owner[slots_S]
        self._residency.state_P[parts_S] &= ~np.uint8(COMING)
        if future.exception() is not None:  # it will be told when the part is needed
            pools.give_back(slots_S)
            return
        self._residency.settle(parts_S, slots_S)
        self._counts.prefetched += len(parts_S) * ahead
        self._counts.read_bytes += len(parts_S) * pools.part_bytes

    def _wait_for_room(self, count: int, kept_parts: NDArray[np.int64]) -> None:
        while not self._residency.make_room(count, kept_parts):
            if not self._wait():
                raise KtoptError(self._full())

    def _wait(self) -> bool:
        """Until something has been written or read. False where nothing is under way."""
        progress = bool(self._writer.pending) and self._writer.wait_for_progress()
        if not progress and self._coming:
            self._coming[0].read.exception()
            progress = True
        self.take_note()
        return progress

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._counts.waits += 1
            self._counts.wait_s += time.perf_counter() - start

    def _full(self) -> str:
        pools = self._residency.pools
        owners = pools.owner[pools.owner >= 0]
        unwritten = int(np.count_nonzero((self._residency.state_P[owners] & ON_DISK) == 0))
        return (
            f"the cache is full: its memory holds {pools.slots:,} parts of {pools.part_bytes:,} bytes, {self._step_parts:,} of "
            f"them for a step's picks, and {unwritten:,} are on no disk. {self._disk_in_words()}. Free room there, raise "
            "cpu_memory_size_GB, or lower max_seq_len"
        )

    def _disk_in_words(self) -> str:
        disk, error = self._disk, self._writer.error
        why = "" if error is None else f": {error.strerror or error}"
        return f"{disk.folder} holds {megabytes(disk.held_bytes)} and has room for {megabytes(disk.free_bytes())}{why}"
