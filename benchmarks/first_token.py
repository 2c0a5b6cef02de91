"""How long it takes from a cold process to SmolLM2's first token, with a warm page cache, and where the time goes.

    python benchmarks/first_token.py [--runs N] [--json FILE] [--rules FILE]

The first line is the whole process: `ktopt run ... -n 1` from its start to its end. The others are the steps of a second
process that does the same by hand, in order; they add up to its time from start to first token.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, Row, arguments, child_json, demo_weights, row, show, time_processes

PROMPT = "What is a compiler? Answer in two sentences."

STEPS = """
import json, os, sys, time

marks = {}
last = float(sys.argv[3])

def mark(step):
    global last
    now = time.time()
    marks[step] = (now - last) * 1e3
    last = now

mark("start of Python")
import ktopt
rules, weights = sys.argv[1:3]
plan = ktopt.compile(rules, "smollm2-135m")
mark("compiling the rules")
import torch
mark("import torch")
from transformers import LlamaForCausalLM
mark("import transformers and its Llama")
from ktopt.applying import apply_plan
from ktopt.runtime.generation import generate_stream
mark("import of ktopt's loader and runner")
model = apply_plan(plan, weights=weights)
mark("applying the plan (loading)")
from ktopt.weights.tokenizer import find_tokenizer
tokenizer = find_tokenizer([weights])
mark("tokenizer")
stream = generate_stream(model, tokenizer, [{"role": "user", "content": sys.argv[4]}], 1, do_sample=False)
text = "".join(stream)
mark("prefill and first token")
assert text, "no token came"
print(json.dumps(marks))
"""


def measure_steps(rules: Path, weights: Path, runs: int) -> list[Row]:
    taken: dict[str, list[float]] = {}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            marks, _ = child_json(STEPS, Path(cache), str(rules), str(weights), repr(time.time()), PROMPT)
        for step, milliseconds in marks.items():
            taken.setdefault(step, []).append(milliseconds)
    totals = [sum(values) for values in zip(*taken.values(), strict=True)]
    return [row("by hand, to the first token", totals), *(row(f"  {step}", values) for step, values in taken.items())]


def main() -> None:
    parser = arguments("From a cold process to SmolLM2's first token.", runs=5)
    parser.add_argument("--rules", type=Path, default=ROOT / "rules" / "smollm2" / "cpu.yaml")
    options = parser.parse_args()
    weights, rules = demo_weights(), options.rules.resolve()
    weights.read_bytes()  # into page cache
    ktopt = str(Path(sys.executable).parent / "ktopt")
    command = [ktopt, "run", str(rules), "--model", "smollm2-135m", "--weights", str(weights), "--prompt", PROMPT]
    whole = time_processes("ktopt run -n 1, whole process", [*command, "-n", "1", "--greedy"], options.runs, target=6000)
    show("first token", [whole, *measure_steps(rules, weights, options.runs)], options.json)


if __name__ == "__main__":
    main()
