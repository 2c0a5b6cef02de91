"""How long loading SmolLM2 takes and how much memory, beside the least that it could.

    python benchmarks/load.py [--runs N] [--json FILE] [--rules FILE ...] [--threads N]

Time: `ktopt.apply` of a plan in hand, against reading the file's bytes from page cache plus dequantising every tensor that the plan
holds dequantised (and copying the others). Memory: the process's peak over that of one with the same imports and one small matrix
product, against the plan's bytes plus the largest tensor. Resident pages of mapped files are counted apart: the system may take
them back at any time. On a busy machine --threads 1 gives steadier times.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, Row, arguments, child_json, demo_weights, row, show

PRELUDE = """
import json, sys, time
import torch, transformers, numpy
from transformers import LlamaConfig, LlamaForCausalLM
import ktopt, ktopt.api, ktopt.compiler
from ktopt.weights.open import open_weights
from pathlib import Path

torch.ones(8, 8) @ torch.ones(8, 8)
rules, weights = sys.argv[1:3]
if int(sys.argv[3]):
    torch.set_num_threads(int(sys.argv[3]))

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024

def report(**found):
    found |= {"peak": status("VmHWM"), "mapped": status("RssFile")}
    print(json.dumps(found))

plan = ktopt.compile(rules, "smollm2-135m")
"""

BASELINE = PRELUDE + "report()\n"

APPLY = (
    PRELUDE
    + """
start = time.perf_counter()
model = ktopt.apply(plan, weights=weights)
seconds = time.perf_counter() - start
report(seconds=seconds, plan_bytes=plan.weight_bytes)
"""
)

FLOOR = (
    PRELUDE
    + """
start = time.perf_counter()
data = bytearray(Path(weights).stat().st_size)
with open(weights, "rb", buffering=0) as file:
    file.readinto(data)
read = time.perf_counter() - start
del data

start = time.perf_counter()
source = open_weights(weights)
opened = time.perf_counter() - start
dtype = getattr(torch, plan.dtype)
start = time.perf_counter()
largest = 0
for name in source.names():
    step = plan.by_path.get(name.rpartition(".")[0])
    if step is None or not step.weight_bytes:
        continue  # the plan holds no copy: a head that shares the embedding's
    held_full = step.weight_bytes >= numpy.prod(source.stored(name).shape) * dtype.itemsize
    if held_full:
        tensor = source.read(name, dtype)
        largest = max(largest, tensor.numel() * tensor.element_size())
    else:
        parts = [data.copy() for _, _, data in source.raw(name)]
        largest = max(largest, sum(part.nbytes for part in parts))
report(read=read, opened=opened, dequantised=time.perf_counter() - start, largest=largest)
"""
)


def measure(rules: Path, weights: Path, runs: int, threads: int) -> list[Row]:
    found: dict[str, list[dict[str, Any]]] = {"baseline": [], "apply": [], "floor": []}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(runs):  # in turn, so that a busy moment hits all three
            for what, code in (("baseline", BASELINE), ("floor", FLOOR), ("apply", APPLY)):
                result, _ = child_json(code, Path(cache), str(rules), str(weights), str(threads))
                found[what].append(result)
    name = f"{rules.parent.name}/{rules.name}"
    read = row(f"{name}: reading the bytes", [f["read"] * 1e3 for f in found["floor"]])
    dequantised = row(f"{name}: dequantising each tensor", [f["dequantised"] * 1e3 for f in found["floor"]])
    floor = read.value + dequantised.value
    applied = [f["seconds"] * 1e3 for f in found["apply"]]
    baseline = min(f["peak"] - f["mapped"] for f in found["baseline"])
    peaks = [(f["peak"] - f["mapped"] - baseline) / 1e6 for f in found["apply"]]
    least = (found["apply"][0]["plan_bytes"] + found["floor"][0]["largest"]) / 1e6
    return [
        read,
        dequantised,
        row(f"{name}: ktopt.apply", applied, target=round(1.3 * floor, 1), note="1.3 times the two above"),
        row(f"{name}: peak over baseline", peaks, "MB", target=round(least, 1), note="the plan's bytes and the largest tensor"),
        row(f"{name}: mapped pages at the end", [f["mapped"] / 1e6 for f in found["apply"]], "MB"),
    ]


def main() -> None:
    parser = arguments("How long loading SmolLM2 takes, and its peak memory.", runs=5)
    parser.add_argument("--rules", type=Path, nargs="+", help="rule files (default: the shipped ones for SmolLM2)")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads (default: its own choice)")
    options = parser.parse_args()
    weights = demo_weights()
    rules = options.rules or sorted((ROOT / "rules" / "smollm2").glob("*.yaml"))
    rows = [line for path in rules for line in measure(path.resolve(), weights, options.runs, options.threads)]
    show(f"loading {weights.name}", rows, options.json)


if __name__ == "__main__":
    main()
