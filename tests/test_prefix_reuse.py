"""Blocks of earlier sessions: a prompt that begins like an earlier one finds them, and never anything else."""

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_fixtures import BLOCKS, LAYERS, LAYOUT, ROWS, bytes_at, data, small_store

from ktopt.cache.blocks import prefix as prefix_module
from ktopt.cache.blocks.files import FileShape
from ktopt.cache.blocks.prefix import PrefixStore
from ktopt.cache.blocks.quota import KeptFiles
from ktopt.cache.blocks.store import BlockStore
from ktopt.diagnostics import KtoptError

T = LAYOUT.tokens
FILE = FileShape("a model", LAYOUT, LAYERS, ROWS).nbytes


def prefixes(tmp_path, **options):
    shape = {"model_hash": "a model", "layout": LAYOUT, "layers": LAYERS, "rows": ROWS}
    return PrefixStore(tmp_path / "prefixes", **shape | options)


def prompt(seed, blocks=BLOCKS, more=1):
    return np.random.default_rng(seed).integers(0, 50_000, blocks * T + more)


def content(tokens, index):
    """What a model would compute for a block of a prompt: of all tokens up to its end."""
    return int(tokens[: (index + 1) * T].sum()) % 1_000_000


def session(tmp_path, tokens, blocks, **options):
    """A store with the blocks of a prompt behind its first one."""
    store = small_store(tmp_path, **options)
    for block in range(blocks):
        for layer in range(LAYERS):
            store.put(layer, block, data(layer, content(tokens, block + 1)))
    return store


def assert_prompts(store, tokens, blocks):
    """The store's first blocks are those of this prompt."""
    for layer in range(LAYERS):
        for block in range(blocks):
            found = bytes_at(store.fetch(layer, torch.tensor([[block]] * ROWS)))
            assert torch.equal(found[:, 0], data(layer, content(tokens, block + 1)))


def keep(tmp_path, tokens, blocks=BLOCKS - 1, **options):
    """A whole session that keeps its blocks."""
    store = session(tmp_path, tokens, blocks)
    kept = prefixes(tmp_path, **options).keep(store, tokens, sink=b"the sink", extra=lambda block: b"anchors %d" % block)
    store.close()
    return kept


def attached(tmp_path, tokens, **options):
    """How many blocks a new session finds; they are right."""
    store = small_store(tmp_path)
    found = prefixes(tmp_path).attach(store, tokens, **options)
    assert_prompts(store, tokens, max(found - 1, 0))
    store.close()
    return found


class TestReuse:
    def test_a_session_finds_the_blocks_of_an_earlier_one(self, tmp_path):
        tokens = prompt(1)
        assert prefixes(tmp_path).match(tokens) == 0
        assert keep(tmp_path, tokens) == BLOCKS
        assert prefixes(tmp_path).match(tokens.tolist()) == BLOCKS
        assert attached(tmp_path, tokens) == BLOCKS

    def test_it_finds_as_much_as_is_alike(self, tmp_path):
        tokens = prompt(1)
        keep(tmp_path, tokens)
        for same in (0, 1, 5, 15):
            other = tokens.copy()
            other[same * T + 1] += 1
            assert prefixes(tmp_path).match(other) == same
            assert attached(tmp_path, other) == same
        assert prefixes(tmp_path).match(tokens[: 3 * T - 1]) == 2
        assert attached(tmp_path, tokens, blocks=4) == 4

    def test_a_longer_session_adds_its_own_blocks(self, tmp_path):
        tokens = prompt(1)
        keep(tmp_path, tokens, 4)
        store = small_store(tmp_path)
        mine = prefixes(tmp_path)
        assert mine.attach(store, tokens) == 5
        for block in range(4, 9):
            for layer in range(LAYERS):
                store.put(layer, block, data(layer, content(tokens, block + 1)))
        assert mine.keep(store, tokens, sink=b"another") == 10
        assert mine.sink(tokens) == b"the sink"
        store.close()
        assert attached(tmp_path, tokens) == 10

    def test_the_callers_bytes_come_along(self, tmp_path):
        tokens = prompt(1)
        keep(tmp_path, tokens)
        mine = prefixes(tmp_path)
        assert mine.sink(tokens) == b"the sink"
        assert mine.extra(tokens, 3) == b"anchors 3"
        assert mine.extra(tokens, BLOCKS) is None
        assert mine.sink(tokens[1:]) is None

    def test_a_sink_of_several_blocks_and_one_of_none(self, tmp_path):
        tokens = prompt(1)
        for sink_blocks in (0, 3):
            folder = tmp_path / str(sink_blocks)
            mine = prefixes(folder, sink_blocks=sink_blocks)
            store = session(folder, tokens, 6)
            assert mine.keep(store, tokens, sink=b"s") == 6 + sink_blocks == mine.match(tokens)
            assert mine.match(tokens[: 2 * T]) == (0 if sink_blocks else 2)
            other = tokens.copy()
            other[1] += 1
            assert mine.match(other) == 0
            store.close()

    def test_nothing_is_copied(self, tmp_path):
        tokens = prompt(1)
        keep(tmp_path, tokens)
        store = small_store(tmp_path)
        prefixes(tmp_path).attach(store, tokens, verify=False)
        assert store.statistics.read_bytes == 0
        assert {path.stat().st_nlink for path in (tmp_path / "prefixes").glob("*.block")} == {2}
        store.close()
        assert {path.stat().st_nlink for path in (tmp_path / "prefixes").glob("*.block")} == {1}

    def test_what_is_attached_can_be_truncated_without_harm_to_others(self, tmp_path):
        tokens = prompt(1)
        keep(tmp_path, tokens)
        store = small_store(tmp_path)
        prefixes(tmp_path).attach(store, tokens)
        store.truncate(2)
        for layer in range(LAYERS):
            store.put(layer, 2, data(layer, 999))
        store.flush()
        assert attached(tmp_path, tokens) == BLOCKS
        store.close()

    def test_only_a_new_cache_with_a_disk_of_the_same_shape_can_take_blocks(self, tmp_path):
        tokens = prompt(1)
        keep(tmp_path, tokens)
        with pytest.raises(KtoptError, match="disk_path"):
            prefixes(tmp_path).attach(BlockStore(LAYOUT, LAYERS, ROWS, 4, device_bytes=0, host_bytes=1 << 20), tokens)
        store = small_store(tmp_path, model_hash="another")
        with pytest.raises(KtoptError, match="another"):
            prefixes(tmp_path).attach(store, tokens)
        store.close()
        store = session(tmp_path, tokens, 2)
        with pytest.raises(KtoptError, match="has 2 already"):
            prefixes(tmp_path).attach(store, tokens)
        store.close()

    def test_files_are_private(self, tmp_path):
        keep(tmp_path, prompt(1))
        folder = tmp_path / "prefixes"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


class TestForeignAndDamaged:
    """They are misses."""

    def kept(self, tmp_path, tokens, index):
        keep(tmp_path, tokens)
        mine = prefixes(tmp_path)
        return mine._path(mine._chain(tokens)[1], index)

    @pytest.mark.parametrize(
        "options",
        [{"model_hash": "another"}, {"layout": replace(LAYOUT, kind="F16")}, {"layers": LAYERS + 1}, {"rows": ROWS + 1}],
    )
    def test_another_models_or_layouts_files(self, tmp_path, options):
        tokens = prompt(1)
        path = self.kept(tmp_path, tokens, 0)
        other = prefixes(tmp_path, **options)
        assert other.match(tokens) == 0
        chain = other._chain(tokens)[1]
        path.rename(other._path(chain, 0))  # and if it had the right name
        assert other.match(tokens) == 0

    def test_a_collision_of_hashes(self, tmp_path, monkeypatch):
        first, second = prompt(1), prompt(2)
        monkeypatch.setattr(prefix_module, "chain_hashes", lambda shape, tokens: [bytes([i]) * 32 for i in range(len(tokens) // T)])
        keep(tmp_path, first)
        assert prefixes(tmp_path).match(first) == BLOCKS
        assert prefixes(tmp_path).match(second) == 0
        assert attached(tmp_path, second) == 0

    @pytest.mark.parametrize("at", ["header", "tokens", "part", "end"])
    def test_a_flipped_bit(self, tmp_path, at):
        tokens = prompt(1)
        path = self.kept(tmp_path, tokens, 5)
        position = {"header": 12, "tokens": 120, "part": FILE - 4096 + 400, "end": 8 * 1024 - 4096 - 1}[at]
        content = bytearray(path.read_bytes())
        content[position] ^= 8
        path.write_bytes(content)
        assert prefixes(tmp_path).match(tokens) == (BLOCKS if at == "part" else 5)
        assert attached(tmp_path, tokens) == 5
        assert prefixes(tmp_path).match(tokens) == 5
        assert keep(tmp_path, tokens) == BLOCKS  # and it is mended
        assert attached(tmp_path, tokens) == BLOCKS

    def test_a_truncated_file(self, tmp_path):
        tokens = prompt(1)
        path = self.kept(tmp_path, tokens, 5)
        os.truncate(path, FILE - 1)
        assert prefixes(tmp_path).match(tokens) == attached(tmp_path, tokens) == 5

    def test_without_verifying_damage_is_an_error_when_it_is_met(self, tmp_path):
        tokens = prompt(1)
        path = self.kept(tmp_path, tokens, 2)
        content = bytearray(path.read_bytes())
        content[FILE - 4096 + 100] ^= 1
        path.write_bytes(content)
        store = small_store(tmp_path)
        assert prefixes(tmp_path).attach(store, tokens, verify=False) == BLOCKS
        with pytest.raises(KtoptError, match="layer 2 of block 1"):
            store.fetch(2, torch.tensor([[1], [1]]))
        store.close()

    def test_damaged_bytes_of_the_caller(self, tmp_path):
        tokens = prompt(1)
        path = self.kept(tmp_path, tokens, 2)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert prefixes(tmp_path).extra(tokens, 1) is None
        assert prefixes(tmp_path).extra(tokens, 2) == b"anchors 2"
        assert prefixes(tmp_path).match(tokens) == 2
        keep(tmp_path, tokens)
        assert prefixes(tmp_path).extra(tokens, 1) == b"anchors 1"

    def test_a_damaged_sink_is_kept_anew(self, tmp_path):
        tokens = prompt(1)
        keep(tmp_path, tokens)
        (path,) = (tmp_path / "prefixes").glob("*.sink")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert attached(tmp_path, tokens) == 0
        keep(tmp_path, tokens)
        assert attached(tmp_path, tokens) == BLOCKS

    def test_a_pipe_instead_of_a_file_is_not_waited_for(self, tmp_path):
        tokens = prompt(1)
        path = self.kept(tmp_path, tokens, 3)
        path.unlink()
        os.mkfifo(path)
        assert prefixes(tmp_path).match(tokens) == attached(tmp_path, tokens) == 3

    def test_a_block_of_another_place(self, tmp_path):
        tokens = prompt(1)
        path = self.kept(tmp_path, tokens, 3)
        path.write_bytes(self.kept(tmp_path, tokens, 4).read_bytes())
        assert prefixes(tmp_path).match(tokens) == 3

    def test_a_link_instead_of_a_file_and_one_that_cannot_be_read(self, tmp_path):
        tokens = prompt(1)
        path = self.kept(tmp_path, tokens, 3)
        elsewhere = path.rename(tmp_path / "elsewhere")
        path.symlink_to(elsewhere)
        assert prefixes(tmp_path).match(tokens) == 3
        path.unlink()
        path.mkdir()
        assert prefixes(tmp_path).match(tokens) == 3

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_somebody_elses_file(self, tmp_path):
        tokens = prompt(1)
        os.chown(self.kept(tmp_path, tokens, 3), 65534, 65534)
        assert prefixes(tmp_path).match(tokens) == attached(tmp_path, tokens) == 3

    def test_a_folder_that_cannot_be_made_is_refused(self, tmp_path):
        (tmp_path / "prefixes").write_text("")
        with pytest.raises(KtoptError, match="prefixes"):
            prefixes(tmp_path)


class TestQuota:
    EACH = FILE + len(b"anchors 1")
    SINK = 4096 + len(b"the sink")

    def test_what_was_used_longest_ago_goes_first_and_the_quota_holds(self, tmp_path):
        quota = 3 * self.SINK + 9 * (self.EACH + 1)
        prompts = [prompt(seed) for seed in range(4)]
        for tokens in prompts[:3]:
            assert keep(tmp_path, tokens, 3, quota_bytes=quota) == 4
        assert [prefixes(tmp_path).match(tokens) for tokens in prompts] == [4, 4, 4, 0]
        attached(tmp_path, prompts[0])
        assert keep(tmp_path, prompts[3], 3, quota_bytes=quota) == 4
        assert [prefixes(tmp_path).match(tokens) for tokens in prompts] == [4, 0, 4, 4]
        assert prefixes(tmp_path).held_bytes <= quota

    def test_the_folder_is_looked_through_once_however_many_blocks_are_kept(self, tmp_path, monkeypatch):
        looked, files = [], KeptFiles.__iter__
        monkeypatch.setattr(KeptFiles, "__iter__", lambda kept: looked.append(1) or files(kept))
        assert keep(tmp_path, prompt(1), 6, quota_bytes=1 << 30) == 7
        assert len(looked) == 1

    def test_a_prefix_is_evicted_from_its_end(self, tmp_path):
        quota = 2 * self.SINK + 8 * (self.EACH + 1)
        keep(tmp_path, prompt(1), 6, quota_bytes=quota)
        keep(tmp_path, prompt(2), 4, quota_bytes=quota)
        assert [prefixes(tmp_path).match(prompt(seed)) for seed in (1, 2)] == [5, 5]

    def test_what_is_in_use_stays(self, tmp_path, caplog):
        quota = 2 * self.SINK + 6 * (self.EACH + 1)
        first, second = prompt(1), prompt(2)
        keep(tmp_path, first, 4, quota_bytes=quota)
        store = small_store(tmp_path)
        assert prefixes(tmp_path).attach(store, first) == 5
        assert keep(tmp_path, second, 4, quota_bytes=quota) == 3
        assert "3 of 5 blocks are kept" in caplog.text
        assert prefixes(tmp_path).held_bytes <= quota
        assert prefixes(tmp_path).match(first) == 5
        assert_prompts(store, first, 4)
        store.close()

    def test_a_file_that_is_removed_stays_with_who_uses_it(self, tmp_path):
        tokens = prompt(1)
        keep(tmp_path, tokens)
        store = small_store(tmp_path)
        prefixes(tmp_path).attach(store, tokens)
        for path in (tmp_path / "prefixes").iterdir():
            path.unlink()
        assert_prompts(store, tokens, BLOCKS - 1)
        assert prefixes(tmp_path).keep(store, tokens) == BLOCKS
        store.close()
        assert attached(tmp_path, tokens) == BLOCKS

    def test_a_full_disk_is_an_error_and_leaves_the_folder_usable(self, tmp_path, monkeypatch):
        tokens = prompt(1)
        store = session(tmp_path, tokens, 6)
        store.flush()
        pwritev, calls = os.pwritev, []

        def full(*args):
            calls.append(1)
            if len(calls) > 6:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwritev(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full)
            with pytest.raises(KtoptError, match="No space left"):
                prefixes(tmp_path).keep(store, tokens, sink=b"s")
        found = prefixes(tmp_path).match(tokens)
        assert 1 < found < 7
        assert attached(tmp_path, tokens) == found
        assert prefixes(tmp_path).keep(store, tokens) == 7
        assert attached(tmp_path, tokens) == 7
        store.close()

    def test_a_quota_for_nothing(self, tmp_path):
        assert keep(tmp_path, prompt(1), quota_bytes=100) == 0
        assert prefixes(tmp_path).held_bytes == 0


class TestProcesses:
    def start(self, tmp_path, script, *arguments):
        source = textwrap.dedent(
            """
            import os, sys, random, time
            from pathlib import Path
            sys.path.insert(0, {tests!r})
            from test_prefix_reuse import *
            tmp_path, seed = Path(sys.argv[1]), int(sys.argv[2])
            """
        ).format(tests=str(Path(__file__).parent))
        command = [sys.executable, "-P", "-c", source + textwrap.dedent(script), str(tmp_path), *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_two_share_the_folder(self, tmp_path):
        """Both keep, evict and read the same and other prompts; what they find is right, and the quota holds all the time."""
        quota = 3 * TestQuota.SINK + 10 * (TestQuota.EACH + 1)
        script = """
            random.seed(seed)
            found = 0
            for step in range(12):
                tokens = prompt(random.randint(0, 4))
                found += attached(tmp_path, tokens)
                keep(tmp_path, tokens, random.randint(1, 6), quota_bytes=int(sys.argv[3]))
                assert prefixes(tmp_path).held_bytes <= int(sys.argv[3])
            print(found)
            """
        both = [self.start(tmp_path, script, seed, quota) for seed in (1, 2)]
        for process in both:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert int(out) > 0
        assert not list(tmp_path.glob("session-*"))
        assert any(attached(tmp_path, prompt(seed)) for seed in range(5))

    def test_wherever_one_dies_what_it_leaves_is_whole(self, tmp_path):
        tokens = prompt(1)
        found = set()
        for calls in range(1, 120, 7):
            child = os.fork()
            if not child:
                left = iter(range(calls))

                def dying(function, left=left):
                    return lambda *args, **kwargs: function(*args, **kwargs) if next(left, None) is not None else os._exit(9)

                for name in ("pwritev", "link", "rename", "fsync", "ftruncate", "utime"):
                    setattr(os, name, dying(getattr(os, name)))
                keep(tmp_path, tokens, 12)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
            found.add(prefixes(tmp_path).match(tokens))
            assert attached(tmp_path, tokens) == prefixes(tmp_path).match(tokens)
        assert len(found) > 3
        assert keep(tmp_path, tokens, 12) == 13

    def test_a_killed_one_leaves_the_folder_usable(self, tmp_path):
        script = """
            print("begun", flush=True)
            for step in range(10000):
                keep(tmp_path, prompt(step % 20), random.randint(1, 12))
            """
        random.seed(3)
        for seed in range(2):
            process = self.start(tmp_path, script, seed)
            assert process.stdout.readline() == "begun\n"
            time.sleep(random.uniform(0.1, 0.6))
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
            for path in (tmp_path / "prefixes").glob("*.block"):
                assert path.stat().st_size >= FILE
            for step in range(20):
                tokens = prompt(step)
                assert prefixes(tmp_path).match(tokens) == attached(tmp_path, tokens)  # whole blocks alone
        assert keep(tmp_path, prompt(1), 12) == 13
        assert not list((tmp_path / "prefixes").glob("*.tmp"))
        assert not list(tmp_path.glob("session-*"))
