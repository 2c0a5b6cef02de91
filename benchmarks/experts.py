"""One layer's routed experts: ktopt's CPU kernels beside kt-kernel's LLAMAFILE method and transformers' experts in bfloat16.

    python benchmarks/experts.py [--tokens N ...] [--types TYPE ...] [--threads N] [--rounds N] [--kt-python PYTHON] [--json FILE]

64 experts of which a token meets 8, hidden 1024, intermediate 512, random weights; four layers in turn, so that weights come from
memory as they do in a model. Each engine runs in a process of its own, the engines one after another for some rounds; medians of
all calls count. kt-kernel runs in the interpreter given, or in this one, with one thread: on few cores more starve each other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import machine
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from torch.nn import functional

ENGINE = Path(__file__).parent / "engines" / "experts_engine.py"
EXPERTS, CHOSEN, HIDDEN, INNER, LAYERS = 64, 8, 1024, 512, 4
SHAPES = {"gate": (EXPERTS, INNER, HIDDEN), "up": (EXPERTS, INNER, HIDDEN), "down": (EXPERTS, HIDDEN, INNER)}
SCALES = {"Q4_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,)}
"""Types that can be drawn at random, and where a block has its float16 scales."""
PEERS = ("kt-kernel", "torch eager", "torch grouped_mm")
CHECKED = 8
"""Tokens whose result is compared with float64."""


def make_file(path: Path, kind: str) -> dict[str, Any]:
    """A GGUF file of random layers; gives the first layer's weights as numbers."""
    rng, number = np.random.default_rng(0), GGMLQuantizationType[kind]
    elements, size = GGML_QUANT_SIZES[number]
    writer = GGUFWriter(path, "qwen3moe")
    first = {}
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            blocks = rng.integers(0, 256, (int(np.prod(shape)) // elements, size), dtype=np.uint8)
            for place in SCALES[kind]:
                scales = rng.standard_normal((len(blocks), 1)) * (2e-4 if kind.endswith("_K") else 4e-4)
                blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8)
            data = blocks.reshape(*shape[:2], -1)
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", data, raw_dtype=number)
            if layer == 0:
                first[name] = torch.from_numpy(quants.dequantize(data, number)).view(shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return first


def make_cases(path: Path, weights: dict[str, Any], tokens: list[int]) -> None:
    """Inputs for all engines, and what the first layer must give for some of them."""
    rng = np.random.default_rng(1)
    most = max(*tokens, CHECKED)
    x = torch.from_numpy(rng.standard_normal((most, HIDDEN)).astype(np.float32)).bfloat16().float()
    index = np.stack([[rng.permutation(EXPERTS)[:CHOSEN] for _ in range(most)] for _ in range(16)]).astype(np.int64)
    share = rng.random((most, CHOSEN)).astype(np.float32)
    expected = torch.zeros(CHECKED, HIDDEN, dtype=torch.float64)
    for token in range(CHECKED):
        for place, expert in enumerate(index[0, token]):
            gate, up, down = (weights[name][expert].double() for name in ("gate", "up", "down"))
            inner = functional.silu(gate @ x[token].double()) * (up @ x[token].double())
            expected[token] += float(share[token, place]) * (down @ inner)
    np.savez(path, tokens=np.array(tokens), x=x.numpy(), index=index, weights=share, expected=expected.numpy())


def run_engine(engine: str, file: Path, cases: Path, options: argparse.Namespace) -> dict[str, Any] | str:
    """What an engine measured, or why it can't."""
    kt = engine == "kt-kernel"
    python, threads = (options.kt_python, 1) if kt else (sys.executable, options.threads)
    result = file.with_suffix(".json")
    command = [python, "-P", str(ENGINE), engine, str(file), str(cases), str(threads), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    said: dict[str, Any] = json.loads(result.read_text())
    return said


def measure(kind: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each engine and number of tokens."""
    file, cases = folder / f"{kind}.gguf", folder / f"{kind}.npz"
    make_cases(cases, make_file(file, kind), options.tokens)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    missing: dict[str, str] = {}
    for _ in range(options.rounds):
        for engine in ("ktopt", *PEERS):
            said = missing.get(engine) or run_engine(engine, file, cases, options)
            if isinstance(said, str):
                missing[engine] = said
                continue
            for tokens in options.tokens:
                row = rows.setdefault((engine, tokens), {"type": kind, "engine": engine, "tokens": tokens, "ms": []})
                row["ms"] += said["ms"][str(tokens)]
                row["error"] = said["error"]
    for engine, why in missing.items():
        print(f"  {kind}: {engine} is missing: {why}")
    return [{**row, "ms": median(row["ms"]), "calls": len(row["ms"])} for row in rows.values()]


def table(rows: list[dict[str, Any]], tokens: list[int]) -> None:
    """Milliseconds by engine and number of tokens, and how often faster ktopt is than the fastest of the others."""
    print("milliseconds for tokens  " + "".join(f"{n:>10}" for n in tokens) + "     error")
    for kind in dict.fromkeys(row["type"] for row in rows):
        found = {(row["engine"], row["tokens"]): row for row in rows if row["type"] == kind}
        for engine in dict.fromkeys(row["engine"] for row in rows if row["type"] == kind):
            numbers = "".join(f"{found[engine, n]['ms']:10.3f}" for n in tokens)
            print(f"  {kind:<5} {engine:<17}{numbers}  {found[engine, tokens[0]]['error']:8.4f}")
        ratios = []
        for n in tokens:
            others = [row["ms"] for (engine, at), row in found.items() if at == n and engine != "ktopt"]
            ratios.append(f"{min(others) / found['ktopt', n]['ms']:9.2f}x" if others else f"{'-':>10}")
        print(f"  {kind:<5} {'times as fast':<17}{''.join(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="One layer's experts, beside kt-kernel and transformers.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 512], help="tokens of a call")
    parser.add_argument("--types", nargs="+", choices=sorted(SCALES), default=["Q4_K", "Q8_0"], help="storage types")
    parser.add_argument("--threads", type=int, default=2, help="threads of ktopt and torch")
    parser.add_argument("--rounds", type=int, default=3, help="how often each engine runs")
    parser.add_argument("--kt-python", default=sys.executable, metavar="PYTHON", help="an interpreter that has kt-kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    options = parser.parse_args()
    here = machine()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for kind in options.types for row in measure(kind, options, Path(folder))]
    table(rows, options.tokens)
    if here["busy"]:
        print(f"warning: the machine is busy (load {here['load']} on {here['cores']} cores); these times are too long")
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "threads": options.threads, "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
