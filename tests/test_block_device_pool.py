"""A device's pool of blocks has the store's bytes in its slots, whatever was asked for before, and keeps what was used last."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from ktopt.cache.blocks import device_pool
from ktopt.cache.blocks.device_pool import DevicePool
from ktopt.cache.blocks.disk import DiskTier
from ktopt.cache.blocks.files import FileShape
from ktopt.cache.blocks.layout import BlockLayout
from ktopt.cache.blocks.store import BlockStore
from ktopt.diagnostics import KtoptError
from ktopt.kernels.blocks import attend_reference, pack
from ktopt.kernels.cuda.slots import SlotSegments, halves
from ktopt.kernels.segments import BlockSegments

LAYERS, ROWS, BLOCKS, T, D = 3, 2, 12, 4, 32
CPU = torch.device("cpu")


class Cache:
    """A store of random blocks, a pool of `slots` over it, and what was asked of the store."""

    def __init__(
        self, kind: str = "Q8_0", slots: int = 20, fetch_blocks: int = 4, disk: DiskTier | None = None, host: int = 1 << 20
    ):
        torch.manual_seed(3)
        self.layout = BlockLayout(T, D, D, kind)
        self.store = BlockStore(
            self.layout, LAYERS, ROWS, BLOCKS, device_bytes=0, host_bytes=host, disk=disk, fetch_blocks=fetch_blocks
        )
        self.raw = {}
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                self.raw[layer, block] = pack(torch.randn(ROWS, T, D), torch.randn(ROWS, T, D), self.layout)
                self.store.put(layer, block, self.raw[layer, block])
        self.pool = DevicePool(
            self.layout,
            LAYERS,
            ROWS,
            BLOCKS,
            nbytes=slots * 2 * T * D * 2 + device_pool.unpacking_bytes(self.layout, LAYERS * ROWS * BLOCKS),
            device=CPU,
            unpack=partial(halves, layout=self.layout),
            fetch_blocks=fetch_blocks,
        )
        self.asked: list[list[list[int]]] = []

    def bring(self, layer: int, picks: list[list[int]]) -> torch.Tensor:
        def fetch(wanted: torch.Tensor) -> torch.Tensor:
            self.asked.append(wanted.tolist())
            return self.store.fetch(layer, wanted)

        return self.pool.bring(layer, torch.tensor(picks, dtype=torch.int32), fetch)

    def check(self, layer: int, picks: list[list[int]]) -> None:
        """What is in the slots is what gguf makes of the blocks' bytes."""
        slots = self.bring(layer, picks)
        assert slots.dtype == torch.int32
        for row, blocks in enumerate(picks):
            for place, block in enumerate(blocks):
                stored = self.raw[layer, block][row].numpy()
                kind = GGMLQuantizationType[self.layout.kind]
                rows = stored[: 2 * T * self.layout.key_row_bytes].reshape(2 * T, -1)
                wanted = torch.from_numpy(quants.dequantize(rows.view({"F16": "<f2", "BF16": "u1"}.get(kind.name, "u1")), kind))
                assert torch.equal(self.pool.pool_SN[slots[row, place]], wanted.half().flatten())


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_any_picks_in_any_order_are_the_stores_blocks_unpacked(kind: str) -> None:
    cache, chance = Cache(kind), random.Random(1)
    for _ in range(60):
        count = chance.randint(1, 4)
        cache.check(chance.randrange(LAYERS), [chance.sample(range(BLOCKS), count) for _ in range(ROWS)])
    assert cache.pool.statistics.evictions > 0
    assert cache.pool.statistics.held_bytes == 20 * 2 * T * D * 2


def test_what_is_there_is_not_asked_for_again() -> None:
    cache = Cache()
    cache.check(0, [[1, 2, 3], [4, 5, 6]])
    cache.check(0, [[3, 1], [6, 4]])
    assert cache.asked == [[[1, 2, 3], [4, 5, 6]]]
    cache.check(0, [[3, 7], [6, 4]])
    assert cache.asked[1] == [[7], [6]]  # a row that lacks nothing asks for something that is there anyway
    counts = cache.pool.statistics
    assert (counts.hits, counts.copied, counts.copied_bytes) == (4 + 3, 7, 7 * cache.layout.nbytes)


def test_the_least_recently_used_goes_first_and_what_is_asked_for_now_never() -> None:
    cache = Cache(slots=8)
    cache.check(0, [[0, 1], [0, 1]])
    cache.check(1, [[0, 1], [0, 1]])
    cache.check(0, [[0], [0]])
    cache.check(0, [[0, 1, 2, 3], [0, 1, 2, 3]])  # takes the other layer's slots, the oldest
    del cache.asked[:]
    cache.check(0, [[0, 1, 2, 3], [3, 2, 1, 0]])
    assert not cache.asked
    cache.check(1, [[0, 1], [0, 1]])
    assert cache.asked == [[[0, 1], [0, 1]]]


def test_large_picks_are_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_pool, "STAGED_BYTES", 3 * BlockLayout(T, D, D, "Q8_0").nbytes)
    cache = Cache(slots=24, fetch_blocks=12)
    cache.check(2, [list(range(12)), list(range(12))[::-1]])
    assert cache.pool.statistics.copied == 24


def test_forgotten_blocks_are_brought_anew() -> None:
    cache = Cache()
    cache.check(0, [[1, 2], [1, 2]])
    cache.pool.truncate(2)
    cache.store.truncate(2)
    for layer in range(LAYERS):
        cache.raw[layer, 2] = pack(torch.randn(ROWS, T, D), torch.randn(ROWS, T, D), cache.layout)
        cache.store.put(layer, 2, cache.raw[layer, 2])
    assert cache.pool.statistics.held_bytes == 2 * 2 * T * D * 2
    cache.check(0, [[1, 2], [1, 2]])


def test_blocks_come_from_disk_too(tmp_path: Path) -> None:
    layout, disk = BlockLayout(T, D, D, "Q8_0"), DiskTier(tmp_path, model_hash="a model", durable=False)
    overhead = disk.overhead_bytes(FileShape("a model", layout, LAYERS, ROWS), BLOCKS) + LAYERS * ROWS * BLOCKS * 13
    cache, chance = Cache(disk=disk, host=overhead + 40 * (layout.nbytes + 12)), random.Random(5)
    for _ in range(20):
        cache.check(chance.randrange(LAYERS), [chance.sample(range(BLOCKS), 3) for _ in range(ROWS)])
    assert cache.store.statistics.misses > 0
    cache.store.close()


def test_a_failing_read_leaves_the_pool_as_it_was() -> None:
    cache = Cache()
    cache.check(0, [[1], [1]])

    def fetch(wanted: torch.Tensor) -> Any:
        raise KtoptError("the disk is gone")

    with pytest.raises(KtoptError, match="the disk is gone"):
        cache.pool.bring(0, torch.tensor([[1, 2], [1, 2]]), fetch)
    del cache.asked[:]
    cache.check(0, [[1, 2], [1, 2]])
    assert cache.asked == [[[2], [2]]]


def test_a_pool_that_does_not_hold_a_step_is_refused_with_the_numbers() -> None:
    with pytest.raises(KtoptError, match=r"needs 0\.\d MB on cpu, for 4 blocks of 2 rows .* raise gpu_memory_size_GB"):
        Cache(slots=7)
    cache = Cache(slots=8)
    with pytest.raises(KtoptError, match="don't fit into the 8 slots"):
        cache.bring(0, [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]])


def test_attention_to_slots_is_attention_to_the_blocks() -> None:
    cache = Cache("F16")
    picks, query = torch.tensor([[3, 0, 9], [1, 2, 3]], dtype=torch.int32), torch.randn(ROWS, 3, D)
    hidden = torch.tensor([[0, 0, 0], [2, 0, 0]])
    slots = SlotSegments(cache.pool.pool_SN, cache.bring(1, picks.tolist()), T, D, hidden)
    there = BlockSegments(cache.layout, cache.store.fetch(1, picks), hidden)
    found, wanted = (attend_reference(query, [part], value_dim=D, scale=0.2) for part in (slots, there))
    torch.testing.assert_close(found, wanted)
