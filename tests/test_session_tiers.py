"""Sessions with most of their blocks on disk: the same answers as in memory, and what happens when the disk doesn't do its part."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from apply_fixtures import make_tokenizer
from gguf_fixtures import make_folder, tiny_model

from ktopt import load_model
from ktopt.cache.blocks import disk as disk_module
from ktopt.config import Config, ModelSettings
from ktopt.diagnostics import KtoptError
from ktopt.long_context.session import LongContextSession
from ktopt.source import SourceFile

pytestmark = pytest.mark.usefixtures("one_thread")

AS_IT_IS = SourceFile("rules.yaml", "version: 1\nrules: []\n")
LONG = {
    "max_seq_len": 1024, "block_size": 32, "local_windows_len": 64, "second_select_num": 4, "preselect_block": False,
    "dense_layer_num": 0, "max_new_tokens": 64, "anchor_type": "QUEST", "chunk_size": 128,
}  # fmt: skip
PROMPT = torch.randint(0, 256, (1, 1000), generator=torch.Generator().manual_seed(1))
TIGHT = {"FP32": 0.0021, "Q8_0": 0.00095}
"""Memory, in GB, for the windows, the chunk and about a quarter of the blocks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiers") / "wide"
    make_tokenizer().save_pretrained(make_folder(made, tiny_model("llama", 5, num_hidden_layers=3, head_dim=32)))
    return made


def opened(model: Path, disk: Path | None, rules: Any = AS_IT_IS, kv_type: str = "FP32", **long: Any) -> LongContextSession:
    """In memory without a disk."""
    kvc2: dict[str, Any] = {"cpu_memory_size_GB": 1}
    if disk is not None:
        kvc2 = {"cpu_memory_size_GB": TIGHT[kv_type], "disk_path": str(disk)}
    config = Config(ModelSettings(name_or_path="wide"), given={"long_context": {**LONG, "kv_type": kv_type, **long}, "kvc2": kvc2})
    session: LongContextSession = load_model(model, rules, mode="long_context", config=config)[0].ktopt_session
    return session


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    with opened(model, None) as session:
        return list(session.generate(PROMPT, 40))


@pytest.mark.parametrize("rules", [AS_IT_IS, None], ids=["as it is", "fused"])
@pytest.mark.parametrize("kv_type", ["FP32", "Q8_0"])
@pytest.mark.parametrize("long", [{}, {"anchor_type": "KEY_INT4", "prefill": "sparse"}, {"dense_layer_num": 2, "token_step": 3}])
def test_with_most_blocks_on_disk_the_answer_is_the_same(
    model: Path, tmp_path: Path, rules: Any, kv_type: str, long: dict[str, Any]
) -> None:
    with opened(model, None, rules, kv_type, **long) as roomy:
        said = list(roomy.generate(PROMPT, 40))
    with opened(model, tmp_path, rules, kv_type, **long) as tight:
        assert list(tight.generate(PROMPT, 40)) == said
        found = tight.kvc2.statistics
        assert found is not None
        assert found.disk_bytes > found.host_bytes > 0
        assert found.evictions > 0 < found.read_bytes
        assert found.host_bytes + found.overhead_bytes <= TIGHT[kv_type] * 1e9
        assert list(tmp_path.glob("session-*/*"))
    assert not list(tmp_path.glob("session-*"))


def run_python(code: str, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Code in a process of its own, which finds this file as `t`."""
    start = "import sys, os; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_session_tiers as t\n"
    command = [sys.executable, "-P", "-c", start + textwrap.dedent(code), str(Path(__file__).parent), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def test_after_a_killed_session_the_next_one_works_and_its_files_are_gone(model: Path, tmp_path: Path, expected: list[int]) -> None:
    code = """
        session = t.opened(Path(sys.argv[2]), Path(sys.argv[3]))
        for number, token in enumerate(session.generate(t.PROMPT, 40)):
            if number == 5:
                os.kill(os.getpid(), 9)
    """
    done = run_python(code, model, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.glob("session-*")
    assert list(left.iterdir())
    with opened(model, tmp_path) as session:
        assert list(session.generate(PROMPT, 40)) == expected
        assert not left.exists()


def test_a_session_that_nobody_closed_leaves_no_files(model: Path, tmp_path: Path) -> None:
    code = """
        session = t.opened(Path(sys.argv[2]), Path(sys.argv[3]))
        session.chunk_prefill(t.PROMPT)
        print(len(list(Path(sys.argv[3]).glob("session-*/*"))))
    """
    done = run_python(code, model, tmp_path)
    assert int(done.stdout) > 1, done.stderr
    assert not list(tmp_path.glob("session-*"))


def tokens_until_an_error(session: LongContextSession, count: int, trouble: Any, at: int) -> tuple[list[int], str]:
    """What a session says when there is trouble before its `at`-th token, and the error that ends it, if one does."""
    said = []
    try:
        for number, token in enumerate(session.generate(PROMPT, count)):
            said.append(token)
            if number == at:
                trouble()
    except KtoptError as error:
        return said, str(error)
    return said, ""


def test_where_disk_path_vanishes_tokens_are_right_or_there_is_a_clear_error(
    model: Path, tmp_path: Path, expected: list[int]
) -> None:
    folder = tmp_path / "blocks"
    with opened(model, folder) as session:
        said, error = tokens_until_an_error(session, 40, lambda: shutil.rmtree(folder), 3)
        assert said == expected[: len(said)]
        assert len(said) == 40 or str(folder) in error
        session.reset()
        assert list(session.generate(PROMPT, 40)) == expected  # a new context makes the folder anew
    assert not list(folder.glob("session-*"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for at in range(0, len(data), 777):
        data[at] ^= 4
    file.write_bytes(data)


def swap(file: Path) -> None:
    others = sorted(other for other in file.parent.glob("0*") if other != file)
    file.unlink()
    shutil.copy(others[-1], file)


@pytest.mark.parametrize("damage", [flip, lambda file: os.truncate(file, 5000), swap], ids=["bits", "end", "other"])
@pytest.mark.parametrize("rules", [AS_IT_IS, None], ids=["as it is", "fused"])
def test_where_a_session_s_own_files_are_damaged_tokens_are_right_or_there_is_a_clear_error(
    model: Path, tmp_path: Path, damage: Any, rules: Any
) -> None:
    """Files stay open: one that another is put in the place of is read as it was."""
    with opened(model, None, rules) as roomy:
        expected = list(roomy.generate(PROMPT, 40))

    def trouble() -> None:
        for file in tmp_path.glob("session-*/0*"):
            damage(file)

    with opened(model, tmp_path, rules) as session:
        said, error = tokens_until_an_error(session, 40, trouble, 3)
        assert said == expected[: len(said)]
        if damage is not swap:
            assert "can't be read back: " in error
            assert "compute the context anew" in error
        assert len(said) == 40 or error
        assert list(session.generate(PROMPT, 40)) == expected


@pytest.mark.parametrize("writes", [0, 30])
def test_where_the_disk_is_full_tokens_are_right_or_there_is_a_clear_error(
    model: Path, tmp_path: Path, expected: list[int], writes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_all, done = disk_module.write_all, []

    def full(*args: Any) -> None:
        done.append(1)
        if len(done) > writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(*args)

    with opened(model, tmp_path) as session:
        monkeypatch.setattr(disk_module, "write_all", full)
        with caplog.at_level(logging.WARNING), pytest.raises(KtoptError, match=r"the cache is full: .*No space left.*max_seq_len"):
            session.chunk_prefill(PROMPT)
        assert "No space left on device; blocks stay in memory while they fit" in caplog.text
        few = PROMPT[:, :200]
        short = list(session.generate(few, 4))  # which memory holds
        monkeypatch.undo()
        assert list(session.generate(PROMPT, 40)) == expected
    with opened(model, None) as roomy:
        assert short == list(roomy.generate(few, 4))


def test_a_disk_that_is_full_while_tokens_are_decoded_makes_none_wrong(
    model: Path, tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(model, tmp_path) as session:
        said, error = tokens_until_an_error(session, 40, lambda: monkeypatch.setattr(disk_module, "write_all", full), 2)
        assert said == expected[: len(said)]
        assert len(said) == 40 or "No space left" in error


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds 6 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("at_token", [None, 0, 6])
def test_a_real_disk_that_others_fill_makes_no_token_wrong(
    model: Path, small_disk: Path, expected: list[int], at_token: int | None
) -> None:
    def fill() -> None:
        with contextlib.suppress(OSError), (small_disk / "theirs").open("wb", buffering=0) as theirs:
            while theirs.write(bytes(4096)):
                pass

    with opened(model, small_disk) as session:
        if at_token is None:
            fill()
        said, error = tokens_until_an_error(session, 40, fill, -1 if at_token is None else at_token)
        assert said == expected[: len(said)]
        assert len(said) == 40 or ("No space left" if said else "there is room for 0.0 MB") in error
        assert at_token is not None or error
        (small_disk / "theirs").unlink()
        assert list(session.generate(PROMPT, 40)) == expected


def test_a_folder_that_can_not_be_written_to_is_refused_at_the_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KtoptError, match=r"disk_path: .*file is no folder that can be written to: choose another"):
        opened(model, tmp_path / "file")
    closed, allowed = tmp_path / "closed", os.access
    closed.mkdir(mode=0o500)
    if os.geteuid() == 0:  # who may do anything
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and allowed(path, mode))
    with pytest.raises(KtoptError, match="closed is no folder that can be written to"):
        opened(model, closed / "new")


MEASURE = """
    import resource
    session = t.opened(Path(sys.argv[2]), Path(sys.argv[3]), max_seq_len=1 << 15, prefill="sparse")
    session.chunk_prefill(t.torch.arange(int(sys.argv[4])) % 251)
    print(session.kvc2.statistics.disk_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_a_long_context_takes_no_more_memory_than_a_short_one_and_the_budget(model: Path, tmp_path: Path) -> None:
    """Of processes' peaks. All blocks of the long one take 50 MB."""
    tight = TIGHT["FP32"] * 1e9 * 4
    few, many = (run_python(MEASURE.replace("t.opened(", f"t.TIGHT.update(FP32={tight / 1e9}) or t.opened("), model, tmp_path, n)
                 for n in (200, 30_000))  # fmt: skip
    short, long = (list(map(int, done.stdout.split())) for done in (few, many))
    assert long[0] > 4 * tight
    assert long[1] - short[1] < tight + (4 << 20)
