"""How many threads compute and on which cores: --threads and --affinity, and torch's pool beside the kernels' own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from apply_fixtures import make_model
from gguf_fixtures import make_gguf

from ktopt.diagnostics import UsageError
from ktopt.runtime.threads import Threads, parse_cores, parse_threads, ranges

RULES = """
version: 1
place: {cpu: "@**"}
rules:
  - {id: linears, match: class=Linear, replace: KTransformersLinear}
"""
binds = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system can't bind threads to cores")


@pytest.mark.parametrize(("text", "cores"), [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("6, 0-1,1", (6, 0, 1))])
def test_cores_are_numbers_and_ranges(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


def test_ranges_read_back() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert parse_cores(ranges([0, 1, 2, 5, 7, 8])) == (0, 1, 2, 5, 7, 8)


@pytest.mark.parametrize(
    ("threads", "affinity", "said"),
    [
        ("0", None, "--threads 0: a whole number from 1 to 1024"),
        ("-2", None, "--threads -2"),
        ("two", None, "--threads two"),
        ("1025", None, "--threads 1025"),
        ("9" * 5000, None, "--threads 9"),
        (None, "", "--affinity : numbers of cores"),
        (None, "3-1", "--affinity 3-1: numbers of cores"),
        (None, "0,,1", "--affinity 0,,1"),
        (None, "0-999999", "--affinity 0-999999"),
        (None, "a", "--affinity a"),
    ],
)
def test_what_can_not_be_meant_is_refused(threads: str | None, affinity: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_threads(threads, affinity)


@binds
def test_a_core_that_is_not_there_is_refused_with_those_that_are() -> None:
    mine = ranges(sorted(os.sched_getaffinity(0)))
    with pytest.raises(UsageError, match=f"--affinity: this process has no core 100000; it has {mine}"):
        Threads(cores=(100000,)).stay_on_cores()


def test_a_system_without_the_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(UsageError, match="can't bind threads"):
        Threads(cores=(0,)).stay_on_cores()
    Threads(2).stay_on_cores()


def test_torch_takes_so_many_or_one_for_each_core() -> None:
    before = torch.get_num_threads()
    try:
        for threads, count in ((Threads(3), 3), (Threads(cores=(0, 1)), 2), (Threads(1, (0, 1)), 1), (Threads(), 1)):
            threads.set()
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


IN_A_PROCESS = """
import os, sys
from ktopt.cli import main
status = main(["run", *sys.argv[1:]])
import torch
cores = {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
print("ended", status, torch.get_num_threads(), len(cores), sorted(next(iter(cores))))
"""


@binds
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system doesn't list a process's threads")
def test_run_binds_every_thread_torchs_and_the_kernels_own(tmp_path: Path) -> None:
    """More threads than cores: they take turns, and the answer comes."""
    (tmp_path / "r.yaml").write_text(RULES)
    file = make_gguf(tmp_path / "m.gguf", make_model("llama"), "Q8_0")
    core = min(os.sched_getaffinity(0))
    asked = ["-w", str(file), "-p", "hello", "--raw", "-n", "8", "--greedy", "--threads", "3", "--affinity", str(core)]
    command = [sys.executable, "-P", "-c", IN_A_PROCESS, str(tmp_path / "r.yaml"), *asked]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines()[-1] == f"ended 0 3 1 [{core}]", run.stderr
