"""What a blocked cache has on a GPU: copies of blocks in a pool, and the attention to them. The store stays in main memory and on
disk; it has all blocks.

Legend: R rows, H query heads of a row, K picks of a row, N tokens, D numbers of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ktopt.cache.blocks.device_pool import DevicePool, slot_numbers, unpacking_bytes
from ktopt.cache.blocks.layout import BlockLayout
from ktopt.cache.blocks.statistics import CacheStatistics
from ktopt.cache.blocks.store import BlockStore
from ktopt.kernels.cuda.blocks import BlockAttention
from ktopt.kernels.cuda.slots import SlotSegments, halves
from ktopt.kernels.segments import CacheSegments

SLOT_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
"""What blocks of a kind are unpacked into on a device; float16 for the others."""


class BlockDevice:
    """The blocks of `store`, in a pool of `nbytes` on `device`. KtoptError where that doesn't hold a step's picks."""

    def __init__(self, store: BlockStore, device: torch.device, nbytes: int, fetch_blocks: int) -> None:
        self.store, self.device, self.layout = store, device, store.layout
        dtype = slot_dtype(self.layout)
        self.pool = DevicePool(
            self.layout,
            store.layers,
            store.rows,
            store.max_blocks,
            nbytes=nbytes,
            device=device,
            unpack=partial(halves, layout=self.layout, dtype=dtype),
            dtype=dtype,
            fetch_blocks=fetch_blocks,
        )
        self._attention = BlockAttention(device)

    @property
    def most_blocks(self) -> int:
        """Of a row, that can be there at once."""
        return int(self.pool.slots // self.store.rows)

    def counted(self, counts: CacheStatistics) -> CacheStatistics:
        """The store's counts, with what was found on the device."""
        pool = self.pool.statistics
        counts.hits_device, counts.device_bytes = pool.hits, pool.held_bytes
        counts.device_budget_bytes = self.pool.pool_SN.nbytes
        return counts

    def picked(self, layer: int, picks_RK: torch.Tensor, hidden_RK: torch.Tensor | None = None) -> SlotSegments:
        """Blocks that each row has picked, to be attended to before others are asked for."""
        slots_RK = self.pool.bring(layer, picks_RK.cpu(), partial(self.store.fetch, layer))
        hidden_RK = None if hidden_RK is None else hidden_RK.cpu()
        return SlotSegments(self.pool.pool_SN, slots_RK, self.layout.tokens, self.layout.key_dim, hidden_RK)

    def unpacked(self, layer: int, picks_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (R, N, D) and values (R, N, V) of blocks, one after another, in float16 or bfloat16."""
        keys, values, _ = self.picked(layer, picks_RK).numbers(self.layout.value_dim, self.device)
        return keys, values

    def attend(
        self, q_RHD: torch.Tensor, segments: Sequence[SlotSegments | CacheSegments], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out, float32 (R, H, V), and the logarithms of the softmaxes' sums (R, H)."""
        return self._attention.attend(q_RHD, segments, value_dim=self.layout.value_dim, scale=scale)


def slot_dtype(layout: BlockLayout) -> torch.dtype:
    return SLOT_DTYPES.get(layout.kind, torch.float16)


def pool_bytes(layout: BlockLayout, parts: int) -> int:
    """What a pool for so many parts takes."""
    return parts * slot_numbers(layout) * int(slot_dtype(layout).itemsize) + unpacking_bytes(layout, parts)
