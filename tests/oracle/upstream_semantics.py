"""KTransformers' rule language as its code behaved, restated as simply as possible. Not fast, and shares nothing with ktopt.

A walk over the tree from the root, depth first. Each module takes the first rule that matches it: `class` is an is-instance test,
`name` a `re.search` in the path, both must hold where both are given. A module that no rule takes is `default` on the default
device.
A rule with a false `recursive` keeps the walk out of what lies below the module that it took: those modules have no entry at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oracle.upstream_trees import UpstreamModule, is_inside

DEFAULT_DEVICE = "cuda:0"


@dataclass(frozen=True)
class Decision:
    """What upstream would have done with a module: the operator's name as the rule has it, its kwargs as written, the two devices,
    and which rule it was (None: none)."""

    operator: str
    kwargs: dict[str, Any]
    generate_device: str
    prefill_device: str
    rule: int | None = None


def resolve(rules: Sequence[dict[str, Any]], tree: Sequence[UpstreamModule]) -> dict[str, Decision]:
    """Each visited module's decision, by path. `rules` as yaml.safe_load gives them; `tree` in pre-order."""
    decisions: dict[str, Decision] = {}
    closed: str | None = None
    for module in tree:
        if closed is not None and is_inside(module.path, closed):
            continue
        winner = first_match(rules, module)
        decisions[module.path] = decide(rules, winner)
        if winner is not None and not bool(rules[winner].get("recursive", True)):
            closed = module.path
    return decisions


def first_match(rules: Sequence[dict[str, Any]], module: UpstreamModule) -> int | None:
    for index, rule in enumerate(rules):
        match = rule["match"]
        if "class" not in match and "name" not in match:
            raise ValueError('match must have "class" or "name"')
        if "class" in match and not is_instance(module, match["class"]):
            continue
        if "name" in match and re.search(match["name"], module.path) is None:
            continue
        return index
    return None


def is_instance(module: UpstreamModule, dotted: str) -> bool:
    """Whether the class that `dotted` imports is in the module's MRO. torch.nn re-exports what torch.nn.modules.* defines."""
    if dotted in module.mro:
        return True
    if dotted.startswith("torch.nn."):
        name = dotted.removeprefix("torch.nn.")
        return any(c.startswith("torch.nn.modules.") and c.rpartition(".")[2] == name for c in module.mro)
    return False


def decide(rules: Sequence[dict[str, Any]], winner: int | None) -> Decision:
    """A rule's devices are its kwargs' `generate_device` and `prefill_device`; the model operators take one `device` for both."""
    if winner is None:
        return Decision("default", {}, DEFAULT_DEVICE, DEFAULT_DEVICE)
    replace = rules[winner]["replace"]
    kwargs = replace.get("kwargs", {})
    device = kwargs.get("device", DEFAULT_DEVICE)
    generate_device = canonical(kwargs.get("generate_device", device))
    prefill_device = canonical(kwargs.get("prefill_device", device))
    return Decision(replace.get("class", "default"), kwargs, generate_device, prefill_device, winner)


def canonical(device: str) -> str:
    """ "cuda" means the current device, which is number 0; the cpu has no number."""
    return device if device == "cpu" or ":" in device else device + ":0"
