"""`ktopt bench`: apply a rule file and measure prefill, decode and memory."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from ktopt import __version__
from ktopt.cli.apply import plan_to_apply
from ktopt.cli.options import add_model, add_target, add_threads, weights_argument, write_text
from ktopt.cli.table import Column, layout
from ktopt.cli.terminal import Progress, columns, size, style_of
from ktopt.diagnostics import UsageError
from ktopt.plan import Plan
from ktopt.runtime.memory import return_large_blocks
from ktopt.runtime.threads import Threads, calm_openmp, parse_threads
from ktopt.versions import installed

BUSY_CORES = 0.1
"""Work of other processes, in cores, from which on a measurement is doubtful."""
MOST_TOKENS, MOST_REPEATS = 1 << 24, 1000
_COLUMNS = (
    Column("phase"), Column("tokens", right=True), Column("after", right=True), Column("tokens/s", right=True),
    Column("least", right=True), Column("most", right=True), Column("others", right=True, dim=True),
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rules", metavar="RULES", help="a rule file, or a plan.json that ktopt plan -o wrote")
    add_model(parser)
    add_target(parser)
    add_threads(parser)
    parser.add_argument("-p", "--prefill", metavar="N,...", default="512", help="prompt lengths to read (default 512; 0 for none)")
    parser.add_argument("-n", "--decode", metavar="N", default="64", help="tokens to make (default 64; 0 for none)")
    parser.add_argument("-d", "--depth", metavar="N,...", default="0", help="tokens in the cache before decoding (default 0)")
    parser.add_argument("-r", "--repeats", metavar="N", default="5", help="measurements of each (default 5)")
    parser.add_argument("--json", metavar="FILE", help='write the results as JSON, "-" for standard output instead of the table')
    parser.add_argument("--force", action="store_true", help="go on although the plan holds errors, or other versions made it")


def run(args: argparse.Namespace) -> int:
    calm_openmp()
    return_large_blocks()
    prefill = [n for n in _numbers("--prefill", args.prefill, 0, MOST_TOKENS) if n]
    depths = _numbers("--depth", args.depth, 0, MOST_TOKENS)
    decode = _number("--decode", args.decode, 0, MOST_TOKENS)
    repeats = _number("--repeats", args.repeats, 1, MOST_REPEATS)
    threads = parse_threads(args.threads, args.affinity)
    threads.stay_on_cores()
    weights = weights_argument(args)
    args.room = max((0, *prefill)) + max(depths) + decode or None
    plan = plan_to_apply(args)
    model, load_s = _loaded(plan, weights, threads, args.force)
    from ktopt.runtime.benchmark import baseline_bytes, measure
    from ktopt.runtime.memory import peak_own_bytes

    rows = []
    for row in measure(model, prefill, decode, depths, repeats):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"{row.phase} of {row.n} after {row.depth}: {row.tokens_per_s:.1f} tokens/s", file=sys.stderr)
    facts = {
        "results": [row.as_data() for row in rows],
        **_facts(args, plan, weights),
        "load_s": load_s,
        "weight_bytes": plan.weight_bytes,
        "peak_bytes": peak_own_bytes(),
        "baseline_bytes": baseline_bytes(),
    }
    _give(facts, args.json)
    return 0


def _numbers(name: str, text: str, least: int, most: int) -> list[int]:
    """The whole numbers of a list such as "512,4096". UsageError for anything else, and for numbers out of range."""
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and len(word) < 20 for word in words):
        raise UsageError(f"{name} {text}: whole numbers, with commas between them")
    numbers = [int(word) for word in words]
    if not all(least <= number <= most for number in numbers):
        raise UsageError(f"{name} {text}: from {least} to {most:,}")
    return list(dict.fromkeys(numbers))


def _number(name: str, text: str, least: int, most: int) -> int:
    numbers = _numbers(name, text, least, most)
    if len(numbers) != 1:
        raise UsageError(f"{name} {text}: one number")
    return numbers[0]


def _loaded(plan: Plan, weights: str, threads: Threads, force: bool) -> tuple[Any, float]:
    """The model of a plan, and the seconds that loading took."""
    from ktopt.api import apply

    threads.set()
    start = time.perf_counter()
    with Progress("loading") as progress:
        model = apply(plan, weights=weights, force=force, progress=progress)
    return model, time.perf_counter() - start


def _facts(args: argparse.Namespace, plan: Plan, weights: str) -> dict[str, Any]:
    """What was measured, on what."""
    import torch

    from ktopt.hardware import cpu_model, detect
    from ktopt.kernels import cpu

    here = detect()
    gpus = [device.model for device in here.devices]
    return {
        "rules": args.rules,
        "model": args.model or plan.model.source,
        "weights": weights,
        "weights_bytes": Path(weights).stat().st_size if Path(weights).is_file() else None,
        "dtype": plan.dtype,
        "threads": torch.get_num_threads(),
        "isa": cpu.isa() if cpu.available()[0] else None,
        "machine": {"cpu": cpu_model(), "cores": here.cores, "ram_bytes": here.ram_bytes, "gpus": gpus, "os": platform.platform()},
        "versions": {
            "ktopt": __version__,
            "python": platform.python_version(),
            **{name: installed(name) for name in ("torch", "transformers", "gguf")},
        },
    }


def _give(facts: dict[str, Any], json_file: str | None) -> None:
    from ktopt.runtime.benchmark import BASELINE

    facts["peak_over_baseline_bytes"] = facts["peak_bytes"] - facts["baseline_bytes"] if facts["baseline_bytes"] else None
    facts["baseline"] = BASELINE
    if json_file:
        write_text(json_file, json.dumps(facts, indent=2) + "\n")
    if json_file != "-":
        print(report(facts, columns(sys.stdout)))


def report(facts: dict[str, Any], width: int) -> str:
    """The results as a table, then where they were measured, memory, and whether to believe them."""
    style = style_of(sys.stdout)
    rows = facts["results"]
    table = layout(_COLUMNS, [_cells(row) for row in rows], width, style, least=8) if rows else "nothing to measure"
    machine, versions = facts["machine"], facts["versions"]
    over, cache = facts["peak_over_baseline_bytes"], max((row["cache_bytes"] for row in rows), default=0)
    memory = f"peak memory {size(facts['peak_bytes'])}"
    if over is not None:
        memory += f", {size(over)} more than {facts['baseline']}"
    lines = [
        f"{facts['threads']} threads of {machine['cpu'] or 'an unknown CPU'} ({machine['cores']} cores), "
        f"kernels {facts['isa'] or 'not built'}, torch {versions['torch']}, transformers {versions['transformers']}",
        f"{memory}; weights {size(facts['weight_bytes'])}, cache at most {size(cache)}; loaded in {facts['load_s']:.2f} s",
    ]
    busy = max((row["foreign_cores"] or 0.0 for row in rows), default=0.0)
    note = ""
    if busy >= BUSY_CORES:
        note = "\n" + style.paint("warning:", "yellow") + f" other processes used up to {busy:.1f} cores; these speeds are too low"
    return table + "\n\n" + style.paint("\n".join(lines), "dim") + note


def _cells(row: dict[str, Any]) -> list[str]:
    foreign = row["foreign_cores"]
    return [
        row["phase"],
        str(row["n"]),
        str(row["depth"]),
        f"{row['tokens_per_s']:,.1f}",
        f"{row['low']:,.1f}",
        f"{row['high']:,.1f}",
        "" if foreign is None else f"{foreign:.2f} cores",
    ]
