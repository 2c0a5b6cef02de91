"""A process that loads a model by a plan, reads a prompt and decodes, and says what it held: benchmarks/memory.py and a test run
it, with a JSON of what to do, and read the JSON that it prints.

The peaks of loading, prefill and decoding are each the process's peak resident set in that phase, which the system is asked to
begin anew (/proc/self/clear_refs). The baseline is the peak of a fresh process that imported the same modules and multiplied two
small matrices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import ktopt
from ktopt.arguments import config_given
from ktopt.runtime.benchmark import baseline_bytes
from ktopt.runtime.decoding import Decoder
from ktopt.runtime.memory import return_large_blocks
from ktopt.source import SourceFile

LEAST_ID, MOST_ID = 100, 500
"""Token ids are drawn between these, which every model has."""


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def phase_peak() -> int:
    """The peak since this was asked last."""
    peak = status("VmHWM")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak


def plan_of(task: dict[str, Any]) -> ktopt.plan.Plan:
    """The plan of a task's rules, a file or a text, on its weights."""
    rules: Any = task["rules"] if task["rules"].endswith(".yaml") else SourceFile("rules.yaml", task["rules"])
    options = {"config": config_given(task["config"]), "mode": "long_context"} if task.get("config") else {}
    return ktopt.compile(rules, task["weights"], weights=task["weights"], **options)


@torch.inference_mode()
def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    return_large_blocks()
    torch.ones(8, 8) @ torch.ones(8, 8)
    model = ktopt.apply(plan_of(task), weights=task["weights"])
    said = {"loading": phase_peak()}
    decoder = Decoder(model)
    ids = torch.randint(LEAST_ID, MOST_ID, (task["batch"], task["tokens"]), generator=torch.Generator().manual_seed(0))
    cache = decoder.new_cache()
    token = decoder.read(ids, cache)
    said["prefill"] = phase_peak()
    for _ in range(task["decode"]):
        token = decoder.step(token, cache)
    said |= {"decode": phase_peak(), "anonymous": status("RssAnon"), "mapped": status("RssFile")}
    print(json.dumps(said | {"baseline": baseline_bytes()}))


if __name__ == "__main__":
    main()
