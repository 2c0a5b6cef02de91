"""A cache's blocks on disk: what comes back is what was put, bit by bit, or there is a clear error."""

import errno
import gc
import itertools
import os
import random
import stat
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from block_fixtures import (
    BLOCKS,
    DIRECT,
    LAYERS,
    LAYOUT,
    ROWS,
    SMALL,
    assert_all_right,
    assert_right,
    bytes_at,
    data,
    each_reader,
    fill,
    small_store,
)

from ktopt.cache.blocks.disk import DiskTier
from ktopt.cache.blocks.files import BlockHeader, FileShape, ForeignFile, pack_header, parse_header
from ktopt.cache.blocks.folders import SessionFolder
from ktopt.cache.blocks.layout import BlockLayout
from ktopt.cache.blocks.store import BlockStore
from ktopt.diagnostics import KtoptError

SHAPE = FileShape("a model", LAYOUT, LAYERS, ROWS)
__all__ = ["each_reader"]
pytestmark = pytest.mark.usefixtures("each_reader")


@pytest.fixture
def store(tmp_path, each_reader):
    made = small_store(tmp_path)
    yield made
    made.close()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def files(folder, ending="block"):
    return sorted(folder.glob(f"session-*/*.{ending}"))


class TestTiers:
    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("device_bytes", [0, 4000])
    def test_a_block_is_the_same_after_all_tiers(self, tmp_path, direct, device_bytes):
        host_bytes = DIRECT if direct else SMALL
        store = small_store(tmp_path, host_bytes=host_bytes, device_bytes=device_bytes, direct=direct)
        fill(store)
        for _ in range(2):
            assert_all_right(store)
        store.flush()  # the last of them may still be on their way
        found = store.statistics
        assert found.misses > BLOCKS
        assert found.evictions > BLOCKS
        assert found.read_bytes == found.misses * LAYOUT.nbytes
        assert found.written_bytes == BLOCKS * LAYERS * ROWS * LAYOUT.nbytes
        assert found.fetched == 2 * LAYERS * ROWS * BLOCKS
        store.close()

    def test_budgets_hold_at_every_step(self, tmp_path):
        store = small_store(tmp_path, host_bytes=SMALL, device_bytes=2000)
        random.seed(1)
        for block in range(BLOCKS):
            for layer in range(LAYERS):
                store.put(layer, block, data(layer, block))
                picks = [[random.randint(0, block) for _ in range(4)] for _ in range(ROWS)]
                assert_right(store, layer, picks)
                store.prefetch((layer + 1) % LAYERS, torch.tensor([[random.randint(0, max(block - 1, 0))]] * ROWS))
                found = store.statistics
                assert found.device_bytes <= found.device_budget_bytes
                assert found.host_bytes + found.overhead_bytes <= found.host_budget_bytes
                assert store._pools.nbytes + found.overhead_bytes <= SMALL + 2000
        store.close()

    def test_nothing_is_written_while_memory_is_half_empty(self, tmp_path):
        store = small_store(tmp_path, host_bytes=100_000)
        fill(store, 4)
        assert not files(tmp_path, "part")
        assert store.statistics.disk_bytes == 0
        store.flush()
        assert len(files(tmp_path)) == 4
        assert store.statistics.disk_bytes == 4 * SHAPE.nbytes
        store.close()

    def test_what_is_prefetched_is_in_memory_when_it_is_asked_for(self, store):
        fill(store)
        picks = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
        assert not store.addresses[0, 0, :3].all()
        store.prefetch(0, picks)
        for future, *_ in store._traffic._coming:
            future.result()
        before = store.statistics.misses
        assert_right(store, 0, picks.tolist())
        assert store.statistics.misses == before
        assert store.statistics.prefetched

    def test_what_is_on_its_way_is_waited_for(self, store):
        fill(store)
        store.prefetch(0, torch.tensor([[0, 1], [0, 1]]))
        assert_right(store, 0, [[0, 1], [0, 1]])
        assert store.statistics.reads == 2  # both rows of a block lie side by side
        assert store.statistics.read_bytes == 4 * LAYOUT.nbytes

    def test_a_prefetch_takes_nothing_from_the_last_fetch(self, store):
        fill(store)
        slots = store._pools.slots
        picks = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]], dtype=torch.int32)
        addresses = store.fetch(1, picks)
        for _ in range(3):
            store.prefetch(2, torch.arange(BLOCKS).repeat(ROWS, 1))
        assert slots in range(9, ROWS * BLOCKS)
        for future, *_ in store._traffic._coming:
            future.result()
        store._traffic.take_note()
        assert torch.equal(store.addresses[1].gather(1, picks.long()), addresses)
        assert store._pools.free == 0

    def test_what_is_selected_at_each_step_stays(self, store):
        fill(store)
        store.flush()
        for step in range(12):
            if step:
                assert store.addresses[0, 0, [3, 7]].all()
                assert store.addresses[0, 1, [3, 8]].all()
                assert store.addresses[1, :, step].all()
            assert_right(store, 0, [[3, 7], [3, 8]])
            assert_right(store, 1, [[step, step + 1], [step, step + 1]])

    def test_a_round_of_layers_that_does_not_fit_finds_some_of_it(self, store):
        fill(store)
        store.flush()
        picks = [[0, 1, 2], [0, 1, 2]]
        for _ in range(10):
            for layer in range(LAYERS):
                assert_right(store, layer, picks)
        found = store.statistics
        assert store._pools.slots - 4 < LAYERS * 6
        assert found.hits_host > found.fetched // 3

    def test_truncated_blocks_leave_the_disk_too(self, tmp_path, store):
        fill(store)
        store.flush()
        store.prefetch(0, torch.tensor([[0, 9], [1, 10]]))
        store.truncate(3)
        assert len(files(tmp_path)) == 3
        assert store.statistics.disk_bytes == 3 * SHAPE.nbytes
        fill(store, first=3)
        assert_all_right(store)

    def test_a_fetch_of_more_than_memory_holds_is_refused_with_the_numbers(self, store):
        fill(store)
        with pytest.raises(KtoptError, match=r"32 parts of a layer .* memory holds 16 of all layers"):
            store.fetch(0, torch.arange(BLOCKS).repeat(ROWS, 1))
        assert_all_right(store)

    def test_few_files_are_open_at_a_time(self, tmp_path):
        store = small_store(tmp_path, open_files=3)
        fill(store)
        assert_all_right(store)
        store.flush()
        assert len(store.disk.handles) <= 3
        mine = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
        assert sum(name.startswith(str(tmp_path)) and not name.endswith("lock") for name in mine) <= 3
        store.close()

    def test_the_process_takes_no_more_memory_than_the_budget(self, tmp_path):
        layout = BlockLayout(tokens=128, key_dim=64, value_dim=64, kind="F16")
        budget, blocks = 8 << 20, 1000
        disk = DiskTier(tmp_path, readers=2, durable=False)
        before = resident_bytes()
        store = BlockStore(layout, 1, 1, blocks, device_bytes=budget // 2, host_bytes=budget // 2, disk=disk, fetch_blocks=16)
        one = torch.zeros(1, layout.nbytes, dtype=torch.uint8)
        for block in range(blocks):
            store.put(0, block, one)
        for first in range(0, blocks - 16, 16):
            store.fetch(0, torch.arange(first, first + 16)[None])
        assert blocks * layout.nbytes > 3 * budget
        assert resident_bytes() - before < budget * 1.1 + (4 << 20)  # threads, and what Python keeps
        assert store.statistics.device_bytes + store.statistics.host_bytes > budget * 0.98
        store.close()

    def test_an_interrupt_leaves_no_slot_to_two_parts(self, store, monkeypatch):
        fill(store)
        store.flush()
        checksum, calls = FileShape.checksum, []

        def interrupted(*args):
            calls.append(1)
            if len(calls) % 3 == 0 and threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return checksum(*args)

        with monkeypatch.context() as patch:
            patch.setattr(FileShape, "checksum", interrupted)
            for block in range(0, 12, 4):
                with suppress(KeyboardInterrupt):
                    store.fetch(0, torch.arange(block, block + 4).repeat(ROWS, 1))
        addresses = store.addresses[store.addresses != 0]
        assert len(addresses.unique()) == len(addresses) == store._pools.slots - store._pools.free
        assert_all_right(store)

    def test_the_table_has_a_row_for_each_tier(self, store):
        fill(store)
        assert_all_right(store)
        table = store.statistics.table()
        assert [row[0] for row in table] == ["tier", "device", "host", "disk"]
        assert all(isinstance(cell, str) for row in table + store.statistics.movements() for cell in row)


class TestAnyOrder:
    """Puts, fetches, prefetches and truncations in any order, beside a plain dict of what is in the cache."""

    @pytest.mark.parametrize("seed", range(8))
    def test_what_is_fetched_is_what_was_put_last(self, tmp_path, seed):
        choose = random.Random(seed)
        fetch_blocks = choose.choice([1, 2, 4])
        store = small_store(
            tmp_path,
            DIRECT,
            choose.choice([0, 1000]),
            fetch_blocks=fetch_blocks,
            open_files=1,
            direct=bool(seed % 2),
            durable=False,
        )
        versions, blocks, known = 0, 0, {}
        for _ in range(120):
            chance, layer = choose.random(), choose.randrange(LAYERS)
            if chance < 0.35 and blocks < BLOCKS:
                for each in range(LAYERS):
                    versions += 1
                    known[each, blocks] = versions
                    store.put(each, blocks, data(each, versions))
                blocks += 1
            elif chance < 0.8 and blocks:
                picks = [[choose.randrange(blocks) for _ in range(fetch_blocks)] for _ in range(ROWS)]
                found = bytes_at(store.fetch(layer, torch.tensor(picks)))
                for row, column in itertools.product(range(ROWS), range(fetch_blocks)):
                    assert torch.equal(found[row, column], data(layer, known[layer, picks[row][column]])[row])
            elif chance < 0.95 and blocks:
                store.prefetch(layer, torch.tensor([[choose.randrange(blocks) for _ in range(5)]] * ROWS))
            elif chance < 0.97:
                store.flush()
            else:
                blocks = choose.randint(0, blocks)
                store.truncate(blocks)
            addresses = store.addresses[store.addresses != 0]
            coming = sum(len(slots) for _, slots, _ in store._traffic._coming)
            assert len(addresses.unique()) == len(addresses) == store._pools.slots - store._pools.free - coming
        store.close()


class TestDirectReads:
    def test_they_read_from_the_disk_itself(self, tmp_path):
        store = small_store(tmp_path, host_bytes=DIRECT, direct=True)
        if not store.disk.direct:
            pytest.skip("the file system of temporary files knows no direct reads")
        fill(store)
        store.flush()
        flags = Path(f"/proc/self/fdinfo/{store.disk.handles.get(0, True).fd}").read_text()
        assert int(flags.split("flags:")[1].split()[0], 8) & os.O_DIRECT
        assert_all_right(store)
        store.close()

    def test_where_there_are_none_pages_are_dropped_and_that_is_said(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr(DiskTier, "_knows_direct", lambda self: False)
        dropped = []
        monkeypatch.setattr(os, "posix_fadvise", lambda *args: dropped.append(args))
        store = small_store(tmp_path, host_bytes=DIRECT, direct=True)
        assert "knows no direct reads" in caplog.text
        fill(store)
        assert_all_right(store)
        assert len(dropped) > BLOCKS
        store.close()


class TestSessionFolder:
    def test_files_are_private(self, tmp_path, store):
        fill(store)
        store.flush()
        folder = files(tmp_path)[0].parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}

    def test_it_is_gone_when_the_store_is_closed_or_forgotten(self, tmp_path):
        for end in ("close", "forget"):
            store = small_store(tmp_path)
            fill(store)
            assert list(tmp_path.glob("session-*"))
            if end == "close":
                store.close()
            del store
            gc.collect()
            assert not list(tmp_path.glob("session-*"))

    def test_it_is_gone_when_the_interpreter_ends(self, tmp_path):
        run_script(tmp_path, "fill(store)")
        assert not list(tmp_path.glob("session-*"))

    def test_those_of_killed_sessions_are_removed_and_those_of_living_ones_are_not(self, tmp_path, store):
        fill(store)
        run_script(tmp_path, "fill(store); store.flush(); os.kill(os.getpid(), 9)", status=-9)
        assert len(list(tmp_path.glob("session-*"))) == 2
        small_store(tmp_path).close()
        assert [path.name for path in tmp_path.glob("session-*")] == [store.disk.session.path.name]
        assert_all_right(store)

    def test_a_fork_leaves_its_parents_alone(self, tmp_path):
        folder = SessionFolder(tmp_path)
        child = os.fork()
        if not child:
            folder.remove()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert folder.path.exists()
        folder.remove()

    def test_a_file_where_the_folder_should_be_is_refused(self, tmp_path):
        (tmp_path / "taken").write_text("")
        with pytest.raises(KtoptError, match=r"taken.*disk_path"):
            small_store(tmp_path / "taken" / "blocks")

    def test_a_folder_without_permission_is_refused(self, tmp_path):
        tmp_path.chmod(0o500)
        child = os.fork()
        if not child:
            try:
                if not os.geteuid():
                    os.setuid(65534)  # root may write everywhere
                SessionFolder(tmp_path)
            except KtoptError as error:
                os._exit(7 if "Permission denied. Set disk_path" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class TestDamage:
    """Parts whose only copy is on disk, and something has happened to it."""

    def on_disk(self, tmp_path, store):
        fill(store)
        store.flush()
        assert not store.addresses[0, :, 0].any()
        return files(tmp_path)[0]

    def damaged(self, store, path, why):
        with pytest.raises(KtoptError, match=why) as caught:
            store.fetch(0, torch.tensor([[0], [0]]))
        assert str(path) in str(caught.value)
        assert "layer 0 of block 0" in str(caught.value)
        assert_right(store, 1, [[5, 3], [6, 2]])  # the others go on
        assert store._pools.free + np.count_nonzero(store._pools.owner >= 0) == store._pools.slots

    def test_a_flipped_bit_is_an_error(self, tmp_path, store):
        path = self.on_disk(tmp_path, store)
        with path.open("r+b") as file:
            file.seek(SHAPE.offset(0, 1) + 77)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
        self.damaged(store, path, "not those that were written")

    def test_a_truncated_file_is_an_error(self, tmp_path, store):
        path = self.on_disk(tmp_path, store)
        os.truncate(path, SHAPE.offset(0, 0) + 10)
        self.damaged(store, path, "ends early")

    def test_another_blocks_file_is_an_error(self, tmp_path, store):
        path = self.on_disk(tmp_path, store)
        store.disk.handles.close()
        path.write_bytes(files(tmp_path)[1].read_bytes())
        self.damaged(store, path, "not those that were written")

    def test_another_models_file_is_an_error(self, tmp_path, store):
        path = self.on_disk(tmp_path, store)
        other = small_store(tmp_path / "other", model_hash="another model")
        for layer in range(LAYERS):
            other.put(layer, 0, data(layer, 5))
        other.flush()
        store.disk.handles.close()
        path.write_bytes(files(tmp_path / "other")[0].read_bytes())
        other.close()
        self.damaged(store, path, "not those that were written")

    def test_a_vanished_file_is_an_error(self, tmp_path, store):
        path = self.on_disk(tmp_path, store)
        store.disk.handles.close()
        path.unlink()
        self.damaged(store, path, "No such file")

    def test_damage_that_a_prefetch_meets_is_told_when_the_part_is_needed(self, tmp_path, store):
        path = self.on_disk(tmp_path, store)
        os.truncate(path, 10)
        store.prefetch(0, torch.tensor([[0], [0]]))
        self.damaged(store, path, "ends early")

    def test_a_damaged_part_that_is_in_memory_too_harms_nobody(self, tmp_path):
        store = small_store(tmp_path, host_bytes=100_000)
        fill(store)
        store.flush()
        for path in files(tmp_path):
            os.truncate(path, 10)
        assert_all_right(store)
        store.close()


class TestFullDisk:
    def test_a_disk_without_room_for_the_worst_case_is_refused(self, tmp_path):
        numbers = r"15 blocks that don't fit .*take 0\.2 MB on disk, and there is room for 0\.1 MB.*cpu_memory_size_GB"
        with pytest.raises(KtoptError, match=numbers):
            small_store(tmp_path, disk_bytes=100_000)
        assert not list(tmp_path.glob("session-*"))

    def test_what_the_disk_has_room_for_counts_too(self, tmp_path, monkeypatch):
        found = os.statvfs(tmp_path)
        monkeypatch.setattr(os, "statvfs", lambda path: type("Found", (), {"f_bavail": 3, "f_frsize": found.f_frsize}))
        with pytest.raises(KtoptError, match=r"there is room for 0\.0 MB"):
            small_store(tmp_path)

    def full_after(self, monkeypatch, blocks):
        """A disk that takes so many files."""
        create = DiskTier._create

        def bounded(disk, block):
            if disk.held_bytes // disk.shape.nbytes >= blocks:
                raise OSError(errno.ENOSPC, "No space left on device")
            create(disk, block)

        monkeypatch.setattr(DiskTier, "_create", bounded)

    def test_blocks_stay_in_memory_while_they_fit_and_then_there_is_an_error(self, tmp_path, store, monkeypatch, caplog):
        self.full_after(monkeypatch, 3)
        fill(store, 4)
        with pytest.raises(KtoptError, match=r"cache is full: .* 16 parts .*8 are on no disk.*No space left.*cpu_memory_size_GB"):
            fill(store, first=4)
        assert caplog.text.count("blocks stay in memory") == 1
        for layer in range(LAYERS):
            assert_right(store, layer, [[0, 2], [3, 1]])

    def test_it_goes_on_when_there_is_room_again(self, store, monkeypatch):
        with monkeypatch.context() as patch:
            self.full_after(patch, 3)
            fill(store, 4)
        fill(store, first=4)
        assert_all_right(store)

    def test_a_write_that_fails_halfway_is_done_again(self, store, monkeypatch):
        pwritev, calls = os.pwritev, []

        def sometimes(fd, buffers, offset):
            calls.append(offset)
            if len(calls) % 40 == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwritev(fd, [buffers[0][:1000]], offset)  # and never all at once

        monkeypatch.setattr(os, "pwritev", sometimes)
        for block in range(BLOCKS):
            for layer in range(LAYERS):
                store.put(layer, block, data(layer, block))
        for _ in range(50):
            with suppress(KtoptError):
                store.flush()
                break
        assert len(calls) > 40 * 4
        assert_all_right(store)

    def test_a_failed_fsync_is_told_and_done_again(self, tmp_path, store, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
            fill(store, 5)
            with pytest.raises(KtoptError, match="Input/output error"):
                store.flush()
        assert not files(tmp_path)
        store.flush()
        assert len(files(tmp_path)) == 5
        assert_all_right(store, 4)

    def test_a_folder_that_vanishes_leaves_what_is_in_memory(self, tmp_path):
        store = small_store(tmp_path, host_bytes=25_000)
        fill(store, 4)
        for path in store.disk.session.path.iterdir():
            path.unlink()
        store.disk.session.path.rmdir()
        fill(store, 8, first=4)
        assert_all_right(store, 8)
        with pytest.raises(KtoptError, match=r"cache is full.*No such file"):
            fill(store, first=8)
        store.close()

    def test_a_real_full_disk(self, tmp_path):
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True).returncode:
            pytest.skip("file systems can't be mounted here")
        try:
            store = small_store(tmp_path, host_bytes=25_000, max_blocks=8)
            for layer, block in ((layer, block) for block in range(8) for layer in range(LAYERS)):
                store.put(layer, block, data(layer, block))
            assert_all_right(store, 8)
            (tmp_path / "other").write_bytes(bytes(os.statvfs(tmp_path).f_bavail * 4096))
            store.close()
            with pytest.raises(KtoptError, match="there is room for"):
                small_store(tmp_path)
        finally:
            subprocess.run(["umount", "-l", tmp_path], check=True)


class TestHeader:
    def test_it_is_read_as_it_was_written(self):
        checksums = np.arange(LAYERS * ROWS, dtype=np.uint32).reshape(LAYERS, ROWS)
        header = BlockHeader(7, checksums, b"c" * 32, np.arange(4), 5, 9)
        found = parse_header(SHAPE, pack_header(SHAPE, header), SHAPE.nbytes + 5)
        assert (found.block, found.chain, found.extra_bytes, found.extra_checksum) == (7, b"c" * 32, 5, 9)
        assert (found.checksums_LR == checksums).all()
        assert (found.tokens == np.arange(4)).all()

    def test_anything_else_is_told_apart(self):
        packed = pack_header(SHAPE, BlockHeader(7, np.zeros((LAYERS, ROWS), dtype=np.uint32)))
        other = FileShape("another model", LAYOUT, LAYERS, ROWS)
        for shape, found, size, why in (
            (other, packed, SHAPE.nbytes, "another model"),
            (SHAPE, packed[:50], SHAPE.nbytes, "ends within"),
            (SHAPE, packed[:-1], SHAPE.nbytes, "ends within"),
            (SHAPE, packed, SHAPE.nbytes - 1, "ends after"),
            (SHAPE, bytes(len(packed)), SHAPE.nbytes, "never finished"),
            (SHAPE, packed[:8] + b"\2" + packed[9:], SHAPE.nbytes, "version 2"),
        ):
            with pytest.raises(ForeignFile, match=why):
                parse_header(shape, found, size)

    def test_any_flipped_bit_is_noticed(self):
        packed = bytearray(pack_header(SHAPE, BlockHeader(7, np.ones((LAYERS, ROWS), dtype=np.uint32))))
        for at in range(0, len(packed), 13):
            packed[at] ^= 16
            with pytest.raises(ForeignFile):
                parse_header(SHAPE, bytes(packed), SHAPE.nbytes)
            packed[at] ^= 16


def run_script(folder, script, status=0):
    """Python in a process of its own, with a store over `folder`."""
    source = textwrap.dedent(
        """
        import os, sys
        sys.path.insert(0, {tests!r})
        from block_fixtures import *
        store = small_store({folder!r})
        """
    ).format(tests=str(Path(__file__).parent), folder=str(folder))
    done = subprocess.run([sys.executable, "-P", "-c", source + script], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    return done.stdout
