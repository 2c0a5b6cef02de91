"""Placements by `ktopt place`, beside those by llama.cpp's and accelerate's rules, by one estimate of a decoded token's time.

    python benchmarks/placement.py [--json FILE]

All three place the same parts with the same bytes. llama.cpp's is the best of its settings that fits: --n-gpu-layers N puts the
last N layers on the cards, shared out by their memory, and the head on the last card; --n-cpu-moe M keeps the experts of the first
M layers in main memory; the embedding is there in any case. accelerate's is what its `infer_auto_device_map` says of a model of
these parts, with the memory of `device_map="auto"` (get_balanced_memory) and with all memory, whichever is better. It knows no
caches, so each part is given to it with its cache, and what passes is taken off the memory of each card: otherwise most of its maps
wouldn't fit.

The last column is `ktopt place --popularity` by a profile that is made up: of a layer's experts the n-th most chosen is chosen 1/n
as often as the first. Real ones differ, from model to model and from text to text.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ktopt.diagnostics import Report
from ktopt.hardware import load_hardware
from ktopt.parse import parse
from ktopt.placing.problem import CPU, Assignment, Problem, fits, time_us
from ktopt.placing.solve import solve
from ktopt.placing.units import make_case
from ktopt.plan_options import PlanOptions
from ktopt.popularity import Popularity, experts_in, layers_of
from ktopt.source import SourceFile
from ktopt.trees import load_tree
from ktopt.validate import validate

FOUR_BITS = """\
version: 1
rules:
  - {match: "class=Linear - name=kv_b_proj", replace: KTransformersLinear, kwargs: {generate_op: KLinearMarlin}}
  - {match: "@model.layers.*.mlp.experts", replace: KTransformersExperts}
"""
PLAIN = "version: 1\nrules: []\n"
EXPERTS = """\
version: 1
rules:
  - {match: "@model.layers.*.{mlp,block_sparse_moe}.experts", replace: KTransformersExperts}
"""
CASES = (
    ("qwen3-30b-a3b", "1x3060-12GB+64GB", PLAIN),
    ("qwen3-30b-a3b", "1x3090+64GB", PLAIN),
    ("qwen3-30b-a3b", "2x3090+64GB", PLAIN),
    ("qwen3-30b-a3b", "1x5090+64GB", PLAIN),
    ("llama-3.1-8b", "1x3060-12GB+32GB", PLAIN),
    ("llama-3.1-70b", "2x4090+128GB", PLAIN),
    ("llama-3.1-70b", "4xA100-80+256GB", PLAIN),
    ("mixtral-8x7b", "1x4090+128GB", PLAIN),
    ("glm-4.5-air", "2x4090+256GB", PLAIN),
    ("qwen3-next-80b-a3b", "2x3090+192GB", PLAIN),
    ("qwen3-235b-a22b", "4xL40S+512GB", PLAIN),
    ("deepseek-v3", "8xH100+2TB", PLAIN),
    ("deepseek-v3", "1x4090+2TB", FOUR_BITS),
)
CONTEXT = 4096


@dataclass(frozen=True)
class Row:
    """Estimated milliseconds of a decoded token; None where nothing fits."""

    model: str
    machine: str
    ktopt: float | None
    llama_cpp: float | None
    accelerate: float | None
    popular: float | None


def problem_of(model: str, machine: str, rules: str, popularity: Popularity | None = None) -> Problem:
    hardware = load_hardware(machine)
    ruleset = validate(parse(SourceFile("rules.yaml", rules), report := Report()), report)
    assert ruleset is not None
    options = PlanOptions(hardware=hardware)
    return make_case(ruleset, load_tree(model), hardware, options, None, CONTEXT, popularity).problem


def made_up(model: str) -> Popularity | None:
    """A profile in which experts are chosen by Zipf's law, each layer's in another order; None for a model without experts."""
    graph, layers = load_tree(model), {}
    for number, module in enumerate(layers_of(graph)):
        count = experts_in(module)
        order = random.Random(number).sample(range(count), count)
        layers[module.path] = tuple(round(1e9 / (1 + rank)) for rank in order)
    return Popularity(model, graph.model_type, graph.digest, 0, layers) if layers else None


def compare(model: str, machine: str, rules: str) -> Row:
    problem = problem_of(model, machine, rules)
    solution = solve(problem)
    ours = None if solution is None else time_us(problem, solution.assignment) / 1e3
    return Row(
        model,
        machine,
        ours,
        best(problem, llama_cpp(problem)),
        best(problem, accelerate(problem)),
        by_popularity(model, machine, rules),
    )


def by_popularity(model: str, machine: str, rules: str) -> float | None:
    """The same with hot experts; None for a model without experts."""
    if (profile := made_up(model)) is None:
        return None
    problem = problem_of(model, machine, EXPERTS if rules == PLAIN else rules, profile)
    solution = solve(problem)
    return None if solution is None else time_us(problem, solution.assignment) / 1e3


def best(problem: Problem, assignments: Iterator[Assignment]) -> float | None:
    """The least time of those that fit."""
    return min((time_us(problem, each) / 1e3 for each in assignments if fits(problem, each)), default=None)


def llama_cpp(problem: Problem) -> Iterator[Assignment]:
    """Placements by llama.cpp's rules, for every --n-gpu-layers and --n-cpu-moe."""
    cards = range(1, len(problem.devices))
    layers = len(problem.items) - 2
    room = [float(problem.room_bytes[d] or 0) for d in cards]
    for on_cards in range(layers + 1, -1, -1):  # the head counts as a layer
        first = layers + 1 - on_cards
        homes = [CPU] * (layers + 2)
        for place in range(on_cards):
            share, card = place / on_cards * sum(room), 0
            while card < len(room) - 1 and share >= sum(room[: card + 1]):
                card += 1
            homes[1 + first + place] = cards[card]
        for in_memory in range(layers + 1):
            moe = [i for i, item in enumerate(problem.items) if item.experts is not None]
            if in_memory and not moe:
                break
            away = {i for i in moe if i - 1 < in_memory}
            experts = tuple(None if problem.items[i].experts is None else CPU if i in away else homes[i] for i in range(layers + 2))
            yield Assignment(tuple(homes), experts)


def accelerate(problem: Problem) -> Iterator[Assignment]:
    """Placements by accelerate's own function, on a model of meta tensors with the parts' bytes."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it looks for the cards on this machine
    model = _stand_in(problem)
    spare = [(room or 1 << 50) - passing for room, passing in zip(problem.room_bytes, problem.transient_bytes, strict=True)]
    memory: dict[int | str, int | str] = {d - 1: max(0, spare[d]) for d in range(1, len(spare))} | {"cpu": spare[CPU]}
    balanced = get_balanced_memory(model, dict(memory), no_split_module_classes=["Layer"])
    for each in (memory, balanced):
        found = infer_auto_device_map(model, dict(each), no_split_module_classes=["Layer"])
        where = {name: CPU if device in ("cpu", "disk") else int(device) + 1 for name, device in found.items()}
        homes = tuple(_at(where, f"items.{i}") for i in range(len(problem.items)))
        yield Assignment(
            homes, tuple(None if item.experts is None else home for item, home in zip(problem.items, homes, strict=True))
        )


def _at(where: dict[str, int], name: str) -> int:
    return where[next(known for known in ("", "items", name) if known in where)]


def _stand_in(problem: Problem):  # type: ignore[no-untyped-def]
    import torch

    class Layer(torch.nn.Module):
        def __init__(self, nbytes: int) -> None:
            super().__init__()
            self.held = torch.nn.Parameter(torch.empty(nbytes, dtype=torch.uint8, device="meta"), requires_grad=False)

    on = min(1, len(problem.devices) - 1)
    parts = [[item.home] if item.experts is None else [item.home, item.experts] for item in problem.items]
    model = torch.nn.Module()
    model.items = torch.nn.ModuleList([Layer(sum(part.held_bytes[on] for part in of)) for of in parts])
    return model


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| model | machine | ktopt place | llama.cpp's rules | accelerate's | hot experts |", "|---|---|---|---|---|---|"]
    for row in rows:
        times = ["-" if each is None else f"{each:,.1f}" for each in (row.ktopt, row.llama_cpp, row.accelerate, row.popular)]
        lines.append(f"| {row.model} | {row.machine} | {' | '.join(times)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    rows = [compare(*case) for case in CASES]
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([row.__dict__ for row in rows], indent=1))


if __name__ == "__main__":
    main()
