"""The engines that benchmarks/cpu.py compares, each run as a process that measures itself and prints JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common import ROOT, run
from cpu_models import Model

SCRIPTS = Path(__file__).parent / "engines"
WARM_UP_TOKENS = 512
BANDWIDTH = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
numbers = torch.ones(1 << 28)
def once():
    start = time.perf_counter()
    numbers.sum()
    return time.perf_counter() - start
best = min(once() for _ in range(5))
print(numbers.nbytes / best / 1e9)
"""


@dataclass(frozen=True)
class Engine:
    """An engine by the name that tables have, the script that runs it, "" for ktopt, with the interpreter, and its variant."""

    name: str
    script: str = ""
    python: str = sys.executable
    variant: str = ""


def engines_for(model: Model, options: argparse.Namespace) -> tuple[list[Engine], list[str]]:
    """The engines that can run a model here, ktopt first, and what is missing."""
    python, missing = options.llama_python or sys.executable, []
    engines = [Engine("ktopt")]
    if _has_llama(python):
        engines += [Engine(f"llama.cpp {variant}", "llama.py", python, variant) for variant in ("flash", "plain")]
    else:
        missing.append("llama.cpp: pip install llama-cpp-python, or give an interpreter that has it with --llama-python")
    engines += [Engine(f"transformers {variant}", "transformers_model.py", variant=variant) for variant in model.variants]
    wanted = tuple(options.engines or [""])
    return [engine for engine in engines if engine.name.startswith(wanted)], missing


@cache
def _has_llama(python: str) -> bool:
    return subprocess.run([python, "-c", "import llama_cpp, numpy"], capture_output=True, check=False).returncode == 0


def run_engine(engine: Engine, model: Model, file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One process of an engine: `results`, as `ktopt bench` has them, peak_over_baseline_bytes, and the version."""
    if not engine.script:
        return _run_ktopt(model, file, options)
    task = {
        "model": str(file), "variant": engine.variant, "threads": options.threads, "prefill": options.prefill,
        "decode": options.decode, "depths": options.depths, "warm_up": WARM_UP_TOKENS,
    }  # fmt: skip
    said = _said([engine.python, str(SCRIPTS / engine.script), json.dumps(task)])
    said["peak_over_baseline_bytes"] = said["peak_bytes"] - _baseline(engine.python, engine.script, model.kind)
    return said


@cache
def _baseline(python: str, script: str, kind: str) -> int:
    """Peak memory of the engine's imports alone."""
    task = {"model": "", "variant": kind, "threads": 1, "prefill": [], "decode": 0, "depths": [], "warm_up": 0, "baseline": True}
    peak: int = _said([python, str(SCRIPTS / script), json.dumps(task)])["peak_bytes"]
    return peak


def _run_ktopt(model: Model, file: Path, options: argparse.Namespace) -> dict[str, Any]:
    rules = options.rules or ROOT / model.rules
    command = [str(Path(sys.executable).parent / "ktopt"), "bench", str(rules), "--weights", str(file), "--json", "-", "-r", "1"]
    command += ["-p", ",".join(map(str, options.prefill)), "-d", ",".join(map(str, options.depths))]
    said = _said([*command, "-n", str(options.decode), "-t", str(options.threads)])
    said["cache_bytes"] = max((row["cache_bytes"] for row in said["results"]), default=0)
    said["version"] = f"ktopt {said['versions']['ktopt']}, {said['isa']}"
    return said


def _said(command: list[str]) -> dict[str, Any]:
    finished = run(command, Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")))
    text = finished.stdout[finished.stdout.index("{") :]
    said: dict[str, Any] = json.loads(text)
    return said


def memory_gb_per_s(threads: int) -> float:
    """How fast this machine reads memory: the best of some sums over 1 GiB."""
    return float(run([sys.executable, "-c", BANDWIDTH, str(threads)], Path.home()).stdout)
