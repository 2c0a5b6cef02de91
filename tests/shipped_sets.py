"""The rule sets that ship, each with a model that it is for, and texts that are made of what they take."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

from ktopt.choosing.fits import DEFAULT_CONTEXT, DEFAULT_STORAGE, Asked, Fit, fit
from ktopt.choosing.sets import ShippedSet, shipped_rules, shipped_sets
from ktopt.folding import fold_paths
from ktopt.graph import ModuleGraph
from ktopt.plan import Plan
from ktopt.plan_diff import device_bytes
from ktopt.trees import load_tree

FOR = {
    "deepseek-v2-lite/24gb": "deepseek-v2-lite",
    "deepseek-v2-lite/cpu": "deepseek-v2-lite",
    "deepseek-v3/24gb": "deepseek-v3",
    "deepseek-v3/2x24gb": "deepseek-v3",
    "deepseek-v3/8x80gb": "deepseek-v3",
    "deepseek-v3/cpu": "deepseek-v3",
    "gemma3/cpu": "gemma-3-270m",
    "glm-4.5-air/24gb": "glm-4.5-air",
    "glm-4.5-air/2x24gb": "glm-4.5-air",
    "glm-4.5-air/cpu": "glm-4.5-air",
    "kimi-k2/24gb": "kimi-k2",
    "kimi-k2/2x24gb": "kimi-k2",
    "kimi-k2/8x80gb": "kimi-k2",
    "kimi-k2/cpu": "kimi-k2",
    "llama-3.1-70b/24gb": "llama-3.1-70b",
    "llama-3.1-70b/2x24gb": "llama-3.1-70b",
    "llama-3.1-70b/cpu": "llama-3.1-70b",
    "llama-3.1-8b/24gb": "llama-3.1-8b",
    "llama-3.1-8b/cpu": "llama-3.1-8b",
    "llama/cpu": "llama-2-70b",
    "mixtral/24gb": "mixtral-8x7b",
    "mixtral/2x24gb": "mixtral-8x7b",
    "mixtral/cpu": "mixtral-8x7b",
    "moonlight/24gb": "moonlight-16b-a3b",
    "moonlight/cpu": "moonlight-16b-a3b",
    "qwen3-235b-a22b/24gb": "qwen3-235b-a22b",
    "qwen3-235b-a22b/2x24gb": "qwen3-235b-a22b",
    "qwen3-235b-a22b/8x80gb": "qwen3-235b-a22b",
    "qwen3-235b-a22b/cpu": "qwen3-235b-a22b",
    "qwen3-30b-a3b/24gb": "qwen3-30b-a3b",
    "qwen3-30b-a3b/cpu": "qwen3-30b-a3b",
    "qwen3-moe/cpu": "qwen3-30b-a3b",
    "qwen3-next/24gb": "qwen3-next-80b-a3b",
    "qwen3-next/2x24gb": "qwen3-next-80b-a3b",
    "qwen3-next/cpu": "qwen3-next-80b-a3b",
    "smollm2/cpu": "smollm2-135m",
    "smollm2/reference": "smollm2-135m",
}
"""Every name of a set but deepseek-r1's, which are deepseek-v3's, and the model that it is looked at with."""
ROWS = {
    "DeepSeek-V3, R1": "deepseek-v3", "Kimi-K2": "kimi-k2", "DeepSeek-V2-Lite": "deepseek-v2-lite",
    "Moonlight-16B-A3B": "moonlight",
    "Qwen3-235B-A22B": "qwen3-235b-a22b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "Qwen3-Next-80B-A3B": "qwen3-next",
    "GLM-4.5-Air": "glm-4.5-air", "Mixtral-8x7B": "mixtral", "Llama-3.1-70B": "llama-3.1-70b", "Llama-3.1-8B": "llama-3.1-8b",
    "Gemma-3-270M": "gemma3", "SmolLM2-135M": "smollm2",
}  # fmt: skip
"""The models of the README's table, by their sets' folder."""
MACHINES = ("cpu", "24gb", "2x24gb", "8x80gb")


@cache
def tree(model: str) -> ModuleGraph:
    return load_tree(model)


@cache
def fitted(name: str) -> Fit:
    """A set for its model, on the machine that it is for, with the usual storage."""
    path = shipped_rules()[name]
    return fit(next(each for each in shipped_sets() if each.path == path), tree(FOR[name]), Asked())


def golden_text(plan: Plan) -> str:
    """A plan with all of its steps, those that differ in their path alone in one row, without versions and digests of texts."""
    steps = sorted(((_data(step), step.path) for step in plan.steps), key=lambda pair: pair[0])
    groups = [(data, [path for _, path in pairs]) for data, pairs in groupby(steps, key=lambda pair: pair[0])]
    order = {step.path: number for number, step in enumerate(plan.steps)}
    groups.sort(key=lambda group: order[group[1][0]])
    rows = [f'    {{"modules": {_folded(paths)}, {data[1:]}' for data, paths in groups]
    moves: dict[str, list[str]] = {}
    for each in plan.transfers:
        moves.setdefault(f'"side": "{each.side}", "source": "{each.source}", "target": "{each.target}"', []).append(each.path)
    transfers = [f'    {{"modules": {_folded(paths)}, {move}}}' for move, paths in moves.items()]
    head = {
        "model": plan.model.source, "hardware": plan.hardware, "dtype": plan.dtype, "default_device": plan.default_device,
        "long_context": dict(plan.long_context), "rules": [rule.id for rule in plan.rules], "bytes": device_bytes(plan),
        "notes": list(plan.notes),
    }  # fmt: skip
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in head.items()]
    lines += [_listed("steps", rows), _listed("transfers", transfers)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _listed(key: str, rows: Sequence[str]) -> str:
    return f'  "{key}": [\n' + ",\n".join(rows) + "\n  ]"


def _data(step: Any) -> str:
    fields = {key: value for key, value in step._asdict().items() if key != "path" and value not in (None, "", (), {})}
    return json.dumps({key: dict(value) if key in ("kwargs", "runs") else value for key, value in fields.items()})


def _folded(paths: Sequence[str]) -> str:
    return json.dumps(" | ".join(pattern.text for pattern in fold_paths(paths)))


def needs_comment(shipped: ShippedSet) -> str:
    """What a set takes, as the last paragraph of its comment has it."""
    names = [name for name in FOR if shipped_rules()[name] == shipped.path]
    count, _ = shipped.cards
    if count:
        found = fitted(names[0])
        said = f"{gb(found.fullest_card)} of {'each' if count > 1 else 'the'} card, {gb(found.main_memory)} of main memory"
    else:
        each = [gb(fitted(name).main_memory) + f" for {FOR[name]}" * (len(names) > 1) for name in names]
        said = f"main memory of {', '.join(dict.fromkeys(each))}"
    text = f"Takes, with {DEFAULT_CONTEXT:,} tokens and weights in {DEFAULT_STORAGE}: {said}."
    if count:
        text += f" The card{'s' * (count > 1)} hold{'s' * (count == 1)} up to {fitted(names[0]).longest:,} tokens."
    return "\n".join(textwrap.wrap(text, 120, initial_indent="# ", subsequent_indent="# ")) + "\n"


def gb(count: int) -> str:
    """Bytes in GB with three digits."""
    number = count / 1e9
    return f"{number:.0f} GB" if number >= 100 else f"{number:.1f} GB" if number >= 0.95 else f"{number:.2f} GB"


def with_needs(text: str, comment: str) -> str:
    """A rule file's text with that paragraph in the place of the one that it has."""
    head, version, rest = text.partition("version: 1")
    head = re.sub(r"(?:#\n)?# Takes, with .*", "", head, flags=re.DOTALL)
    return f"{head}#\n{comment}{version}{rest}"


def readme_table() -> str:
    """What each model's sets take on each machine."""
    lines = ["| model | sets | CPU only | one card of 24 GB | two of 24 GB | eight of 80 GB |", "|---|---|---|---|---|---|"]
    for title, folder in ROWS.items():
        cells = [_cell(f"{folder}/{machine}") for machine in MACHINES]
        lines.append(f"| {title} | {folder}/ | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str) -> str:
    if name not in FOR:
        return ""
    found = fitted(name)
    card = f"{gb(found.fullest_card).removesuffix(' GB')} + " if found.fullest_card else ""
    return card + gb(found.main_memory)


def sets_table() -> str:
    """Every set, what it is for, and what it takes."""
    lines = ["| set | model | each card | main memory | context up to |", "|---|---|---|---|---|"]
    for name, model in FOR.items():
        found = fitted(name)
        card = gb(found.fullest_card) if found.fullest_card else "-"
        lines.append(f"| {name} | {model} | {card} | {gb(found.main_memory)} | {found.longest:,} |")
    return "\n".join(lines)


def with_table(text: str, table: str) -> str:
    """A page with this table in the place of the one with the same first line."""
    head = re.escape(table.split("\n", 1)[0])
    return re.sub(rf"^{head}\n(?:\|.*\n)+", lambda found: f"{table}\n", text, flags=re.MULTILINE)
