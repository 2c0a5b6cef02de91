"""A cache's blocks in memory: what was put is fetched bit by bit, budgets hold, and what is selected stays."""

import numpy as np
import pytest
import torch
from block_fixtures import BLOCKS, LAYERS, LAYOUT, PLENTY, ROWS, assert_right, bytes_at, data, fill

from ktopt.cache.blocks.eviction import HALF_LIFE, MOST, Warmth
from ktopt.cache.blocks.layout import BlockLayout
from ktopt.cache.blocks.store import BlockStore
from ktopt.diagnostics import KtoptError


@pytest.fixture
def store():
    made = BlockStore(LAYOUT, LAYERS, ROWS, BLOCKS, device_bytes=10_000, host_bytes=PLENTY, fetch_blocks=4)
    yield made
    made.close()


class TestInMemory:
    def test_what_was_put_is_fetched_from_both_pools(self, store):
        fill(store)
        for layer in range(LAYERS):
            assert_right(store, layer, [[0, 3, 15, 7], [2, 1, 8, 14]])
        found = store.statistics
        assert found.hits_device
        assert found.hits_host
        assert found.hits_device + found.hits_host == found.fetched == LAYERS * ROWS * 4
        assert (found.misses, found.evictions, found.waits) == (0, 0, 0)

    def test_kernels_read_the_table_of_addresses(self, store):
        table = store.addresses
        assert not table.any()
        fill(store, 5)
        assert table is store.addresses
        assert table[:, :, :5].all()
        assert not table[:, :, 5:].any()
        picks = torch.tensor([[4, 0], [1, 2]], dtype=torch.int32)
        assert torch.equal(store.fetch(1, picks), table[1].gather(1, picks.long()))
        store.touch(1, picks)
        assert store.statistics.fetched == 8

    def test_no_two_parts_share_memory(self, store):
        fill(store)
        addresses = store.addresses.flatten().sort().values
        assert (addresses.diff() >= LAYOUT.nbytes).all()
        assert not (addresses % 64).any()

    def test_truncated_blocks_are_gone_and_can_be_put_anew(self, store):
        fill(store)
        store.truncate(3)
        with pytest.raises(KtoptError, match="block 3 of layer 1 isn't in the cache"):
            store.fetch(1, torch.tensor([[3], [1]]))
        assert_right(store, 2, [[0, 1, 2], [2, 1, 0]])
        fill(store, first=3)
        assert_right(store, 1, [[3, 15, 2], [3, 4, 5]])

    def test_bad_blocks_are_refused(self, store):
        store.put(0, 0, data(0, 0))
        with pytest.raises(KtoptError, match="already"):
            store.put(0, 0, data(0, 0))
        with pytest.raises(KtoptError, match=r"block 16 .* 16 blocks"):
            store.put(0, BLOCKS, data(0, 0))
        with pytest.raises(KtoptError, match="block 1 of layer 0 isn't"):
            store.fetch(0, torch.tensor([[0, 1], [0, 0]]))

    def test_one_row_of_latents(self):
        layout = BlockLayout(tokens=4, key_dim=96, value_dim=64, kind="F16", shared=True)
        store = BlockStore(layout, 1, 1, 4, device_bytes=0, host_bytes=PLENTY)
        store.put(0, 2, data(0, 2, 1, layout))
        assert torch.equal(bytes_at(store.fetch(0, torch.tensor([[2]])), layout.nbytes)[0], data(0, 2, 1, layout))


class TestBudgets:
    @pytest.mark.parametrize(("device_bytes", "host_bytes"), [(40_000, 0), (0, 40_000), (20_000, 20_001), (37_000, 300)])
    def test_pools_index_and_reserved_bytes_stay_within_them(self, device_bytes, host_bytes):
        store = BlockStore(
            LAYOUT, LAYERS, ROWS, BLOCKS, device_bytes=device_bytes, host_bytes=host_bytes, host_reserved_bytes=min(host_bytes, 100)
        )
        taken = store._pools.nbytes + store.statistics.overhead_bytes + min(host_bytes, 100)
        assert taken <= device_bytes + host_bytes
        fill(store)
        held = store.statistics
        assert held.device_bytes <= device_bytes
        assert held.host_bytes <= host_bytes
        assert held.device_bytes + held.host_bytes == LAYERS * ROWS * BLOCKS * LAYOUT.nbytes

    def test_what_the_index_takes_is_what_is_counted(self, store):
        residency, pools = store._residency, store._pools
        per_part = residency.addresses_P.nbytes + residency.state_P.nbytes + residency.warmth._warmth_P.nbytes
        assert per_part <= store.statistics.overhead_bytes
        assert pools.owner.nbytes + pools._free.nbytes + pools.slots * LAYOUT.nbytes == pools.nbytes

    def test_a_step_that_does_not_fit_is_refused_with_the_numbers(self):
        with pytest.raises(KtoptError, match=r"needs 8 blocks of 2 rows in memory, 0\.0 MB, .*cpu_memory_size_GB") as caught:
            BlockStore(LAYOUT, LAYERS, ROWS, BLOCKS, device_bytes=2000, host_bytes=2000, fetch_blocks=8)
        assert "select fewer blocks" in str(caught.value)

    def test_blocks_that_fit_nowhere_are_refused_with_the_numbers(self):
        with pytest.raises(KtoptError, match=r"1,600 blocks of 3 layers take 3\.1 MB, and the budgets leave 0\.9 MB.*disk_path"):
            BlockStore(LAYOUT, LAYERS, ROWS, 1600, device_bytes=0, host_bytes=PLENTY)


class TestWarmth:
    """What is taken out first."""

    def order(self, warmth, parts):
        parts = np.array(parts)
        taken = [int(parts[warmth.coldest(parts, n)].sum()) for n in range(1, len(parts))]
        taken.append(int(parts.sum()))
        return [b - a for a, b in zip([0, *taken], taken, strict=False)]

    def test_the_least_recently_selected_goes_first(self):
        warmth = Warmth(1, 8)
        for part in (3, 1, 2, 5):
            warmth.mark(0, np.array([part]))
        assert self.order(warmth, [1, 2, 3, 5]) == [3, 1, 2, 5]

    def test_what_is_selected_often_outlasts_what_was_selected_just_now(self):
        warmth = Warmth(1, 8)
        for step in range(20):
            warmth.mark(0, np.array([1, 2] if step % 2 else [1]))
        warmth.mark(0, np.array([4]))
        assert self.order(warmth, [1, 2, 4]) == [4, 2, 1]
        for _ in range(int(4 * HALF_LIFE)):
            warmth.mark(0, np.array([4]))
        assert self.order(warmth, [1, 2, 4])[-1] == 4

    def test_new_parts_begin_as_selected_once_just_now_whatever_was_there_before(self):
        warmth = Warmth(1, 8)
        for part in (2, 2, 2, 1, 1):
            warmth.mark(0, np.array([part]))
        assert self.order(warmth, [1, 2]) == [1, 2]
        warmth.begin(0, np.array([2]))
        assert self.order(warmth, [1, 2, 3]) == [3, 2, 1]

    def test_among_parts_alike_the_layer_that_comes_last_gives_first(self):
        warmth = Warmth(4, 8)
        for layer in (0, 1, 2, 3, 0, 1):
            warmth.mark(layer, np.array([layer * 8]))
        warmth._warmth_P[[0, 8, 16, 24]] = warmth._gain
        assert self.order(warmth, [0, 8, 16, 24]) == [8, 0, 24, 16]

    def test_it_never_overflows_and_keeps_the_order_where_it_scales_down(self):
        warmth = Warmth(2, 8)
        for step in range(4000):
            warmth.mark(step % 2, np.array([step % 2 * 8 + step % 3]))
            assert warmth._warmth_P.max() < MOST * 100
        assert self.order(warmth, [0, 1, 2]) == [1, 0, 2]  # layer 0 was last marked at 3,994, 3,996 and 3,998
