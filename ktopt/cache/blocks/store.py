"""A cache's blocks over the tiers of a machine: a device pool and a host pool in memory, and files on disk.

A block of T tokens has one part for each row of each layer, and parts move by themselves: what one row selects needn't be what
another does. Kernels read parts in place, at `addresses`. On a machine whose device is its CPU both pools are main memory, and a
part is read from either, so that it never moves between them.

One thread calls a store. Legend: L layers, R rows, M blocks at most, K picks of a row, N bytes of a part, S some parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ktopt.cache.blocks.disk import DiskTier
from ktopt.cache.blocks.files import BlockHeader, FileShape
from ktopt.cache.blocks.foresight import Foresight
from ktopt.cache.blocks.layout import BlockLayout
from ktopt.cache.blocks.pools import Budget, Pools
from ktopt.cache.blocks.residency import KNOWN, ON_DISK, PART_INDEX_BYTES, Residency
from ktopt.cache.blocks.statistics import CacheStatistics, megabytes
from ktopt.cache.blocks.traffic import DiskTraffic
from ktopt.diagnostics import KtoptError

NONE = np.zeros(0, dtype=np.int64)


class BlockStore:
    """Blocks of `layout` for `rows` rows in each of `layers` layers, `max_blocks` of them at most.

    The pools, the index and the buffers of reads take no more than the budgets, less what is reserved for others there. One fetch
    asks for `fetch_blocks` blocks of a row at most. KtoptError where these don't fit into memory, or not all blocks into memory
    and disk together. Nothing is written to `disk` before half of the memory is taken.
    """

    def __init__(
        self,
        layout: BlockLayout,
        layers: int,
        rows: int,
        max_blocks: int,
        *,
        device_bytes: int,
        host_bytes: int,
        disk: DiskTier | None = None,
        device_reserved_bytes: int = 0,
        host_reserved_bytes: int = 0,
        fetch_blocks: int = 1,
    ) -> None:
        self.layout, self.layers, self.rows, self.max_blocks, self.disk = layout, layers, rows, max_blocks, disk
        self._budget = Budget(device_bytes, host_bytes, device_reserved_bytes, host_reserved_bytes)
        parts, fetch_blocks = layers * rows * max_blocks, min(fetch_blocks, max_blocks)
        shape = FileShape(disk.model_hash if disk else "", layout, layers, rows)
        self._overhead_bytes = parts * PART_INDEX_BYTES + (disk.overhead_bytes(shape, max_blocks) if disk else 0)
        slots = self._budget.slots(layout.nbytes, self._overhead_bytes, parts)
        self._check_memory(sum(slots), fetch_blocks, disk=disk is not None)
        self._pools = Pools(layout.nbytes, *slots)
        self._residency = Residency(layers, rows, max_blocks, self._pools)
        self._addresses_P = self._residency.addresses_P
        self._first_parts_LR1 = np.arange(layers * rows, dtype=np.int64).reshape(layers, rows, 1) * max_blocks
        self._kept = NONE  # what was fetched last, which stays put
        self._counts = CacheStatistics()
        self._foresight = Foresight()
        self._adopted = False
        self._traffic = self._open(disk, shape, rows * fetch_blocks) if disk else None

    @property
    def addresses(self) -> torch.Tensor:
        """Where a part's bytes are, int64 (L, R, M); 0 where in no memory. Always the same tensor: kernels may hold on to it."""
        return self._residency.addresses

    def put(self, layer: int, block: int, data_RN: torch.Tensor) -> None:
        """Store a new block of a layer, uint8. KtoptError where memory is full and nothing can leave it."""
        if not 0 <= block < self.max_blocks:
            raise KtoptError(f"block {block} doesn't fit into a cache of {self.max_blocks} blocks: give it a greater max_seq_len")
        parts_R = self._first_parts_LR1[layer, :, 0] + block
        if self._residency.state_P[parts_R].any():
            raise KtoptError(f"block {block} of layer {layer} is in the cache already")
        if self._traffic is not None:
            self._traffic.check_process()
            self._traffic.room_to_put()
        slots_R = self._pools.take(parts_R)
        self._pools.write(slots_R, data_RN.numpy())
        self._residency.state_P[parts_R] = KNOWN
        self._residency.settle(parts_R, slots_R)
        self._residency.warmth.begin(layer, parts_R)
        self._counts.put_bytes += self.rows * self.layout.nbytes
        if self._traffic is not None:
            self._traffic.write(layer, block, slots_R.tolist(), begin=self._pools.free * 2 < self._pools.slots)

    def fetch(self, layer: int, picks_RK: torch.Tensor) -> torch.Tensor:
        """Addresses (R, K) of what each row has picked, int32 or int64, in memory. They hold until the store's next fetch or put.
        KtoptError for a block that isn't there, and for one whose only copy was on disk and is damaged."""
        addresses_RK, rest = self.fetch_begin(layer, picks_RK)
        return addresses_RK if rest is None else rest()

    def fetch_begin(self, layer: int, picks_RK: torch.Tensor) -> tuple[torch.Tensor, Callable[[], torch.Tensor] | None]:
        """The addresses (R, K) of parts in memory, 0 for those that are on their way from disk; and what waits for these and gives
        all addresses, None where none is missing. They hold as those of `fetch` do."""
        parts_RK = picks_RK.numpy() + self._first_parts_LR1[layer]
        addresses_RK = self._addresses_P[parts_RK]
        if np.count_nonzero(addresses_RK) < addresses_RK.size:
            return self._fetch_missing(layer, parts_RK)
        self._mark(layer, parts_RK, addresses_RK)
        return torch.from_numpy(addresses_RK), None

    def touch(self, layer: int, picks_RK: torch.Tensor) -> None:
        """Note that a kernel has used these picks, all in memory, at the `addresses`: as `fetch`, but without asking for them."""
        parts_RK = picks_RK.numpy() + self._first_parts_LR1[layer]
        self._mark(layer, parts_RK, self._addresses_P[parts_RK])

    def prefetch(self, layer: int, picks_RK: torch.Tensor) -> None:
        """Begin to bring in what is likely to be picked soon. What the last fetch has asked for stays in memory, and where there is
        no room beside it, this brings in less, or nothing; so it does where most of what was brought in so was of no use."""
        if self._traffic is None or self._all_in_memory:
            return
        self._traffic.check_process()
        parts_RK = picks_RK.numpy() + self._first_parts_LR1[layer]
        if np.count_nonzero(self._addresses_P[parts_RK]) < parts_RK.size and self._foresight.pays():
            self._foresight.brings(layer, self._traffic.begin_reads(layer, np.unique(parts_RK), self._kept))

    def truncate(self, blocks: int) -> None:
        """Forget the blocks from `blocks` on, in all layers."""
        if self._traffic is not None:
            self._traffic.check_process()
            self._traffic.truncate(blocks)
        parts_LRM = self._first_parts_LR1 + np.arange(blocks, self.max_blocks)
        self._residency.forget(parts_LRM.reshape(-1))
        self._foresight.forget()
        self._kept = NONE

    def flush(self) -> None:
        """Write all blocks to disk, durably. KtoptError where it doesn't take them."""
        if self._traffic is not None:
            self._traffic.check_process()
            self._traffic.flush()

    @property
    def _all_in_memory(self) -> bool:
        """For sure: nothing has ever left memory, or come from elsewhere."""
        return not (self._residency.evictions or self._adopted)

    @property
    def whole_blocks(self) -> int:
        """How many blocks from the first on have all their parts."""
        known_M = (self._residency.state_P.reshape(-1, self.max_blocks) & KNOWN).all(axis=0)
        return self.max_blocks if known_M.all() else int(known_M.argmin())

    def adopt(self, block: int, file: Path, check: Callable[[BlockHeader], None]) -> None:
        """Take a file for a block, all layers of it: the block is on disk then. Raises as DiskTier.adopt does."""
        assert self.disk is not None, "only a cache with a disk tier takes files for blocks"
        self.disk.adopt(block, file, check)
        self._adopted = True
        self._residency.state_P[self._first_parts_LR1[:, :, 0] + block] = KNOWN | ON_DISK

    def close(self) -> None:
        """End the threads and remove the files. Nothing may be asked of the store afterwards."""
        if self._traffic is not None:
            self._close()

    @property
    def statistics(self) -> CacheStatistics:
        counts = self._counts
        counts.device_bytes, counts.host_bytes = self._pools.held()
        counts.overhead_bytes = self._overhead_bytes
        counts.device_budget_bytes, counts.host_budget_bytes = self._budget.device_bytes, self._budget.host_bytes
        counts.evictions = self._residency.evictions
        if self.disk is not None:
            counts.disk_bytes, counts.written_bytes = self.disk.held_bytes, self.disk.written_bytes
        return counts

    def _open(self, disk: DiskTier, shape: FileShape, step_parts: int) -> DiskTraffic:
        disk.open(shape, self.max_blocks)
        parts_of_block = self.layers * self.rows
        not_in_memory = max(self.max_blocks * parts_of_block - (self._pools.slots - step_parts), 0)
        try:
            disk.require_room(-(-not_in_memory // parts_of_block), f"of {self.max_blocks:,} of {megabytes(shape.nbytes)}")
        except KtoptError:
            disk.close()
            raise
        traffic = DiskTraffic(disk, self._residency, self._counts, self.max_blocks, step_parts)
        self._close = weakref.finalize(self, traffic.close)
        return traffic

    def _mark(self, layer: int, parts_RK: NDArray[np.int64], addresses_RK: NDArray[np.int64], misses: int = 0) -> None:
        self._kept = parts_RK
        self._foresight.asked(layer, parts_RK)
        self._residency.warmth.mark(layer, parts_RK)
        on_device = int(np.count_nonzero(self._pools.on_device(addresses_RK))) if self._pools.device_slots else 0
        counts = self._counts
        counts.misses += misses
        counts.hits_device += on_device
        counts.hits_host += addresses_RK.size - misses - on_device

    def _fetch_missing(self, layer: int, parts_RK: NDArray[np.int64]) -> tuple[torch.Tensor, Callable[[], torch.Tensor] | None]:
        unknown = parts_RK[(self._residency.state_P[parts_RK] & KNOWN) == 0]
        if unknown.size:
            raise KtoptError(f"block {unknown[0] % self.max_blocks} of layer {layer} isn't in the cache")
        assert self._traffic is not None, "without a disk all parts are in memory"
        traffic = self._traffic
        traffic.check_process()
        traffic.take_note()
        found_RK = self._addresses_P[parts_RK]
        misses = found_RK.size - int(np.count_nonzero(found_RK))
        self._mark(layer, parts_RK, found_RK, misses)
        if not misses:
            return torch.from_numpy(found_RK), None
        traffic.begin_reads(layer, np.unique(parts_RK[found_RK == 0]), parts_RK, ahead=False)

        def rest() -> torch.Tensor:
            traffic.bring(parts_RK.reshape(-1))
            return torch.from_numpy(self._addresses_P[parts_RK])

        return torch.from_numpy(found_RK), rest

    def _check_memory(self, slots: int, fetch_blocks: int, *, disk: bool) -> None:
        part_bytes, parts = self.layout.nbytes, self.layers * self.rows * self.max_blocks
        step = self.rows * fetch_blocks
        left = f"the budgets leave {megabytes(slots * part_bytes)}: {self._budget.in_words(self._overhead_bytes)}"
        if slots < step:
            raise KtoptError(
                f"one layer's step needs {fetch_blocks} blocks of {self.rows} rows in memory, {megabytes(step * part_bytes)}, and "
                f"{left}. Raise gpu_memory_size_GB or cpu_memory_size_GB, or select fewer blocks"
            )
        if slots < parts and not disk:
            raise KtoptError(
                f"{self.max_blocks:,} blocks of {self.layers} layers take {megabytes(parts * part_bytes)}, and {left}. Raise "
                "cpu_memory_size_GB, set disk_path, keep keys and values in a smaller kv_type, or lower max_seq_len"
            )
