"""Whether two rule files resolve alike on a model: compiles both and compares the plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from ktopt.folding import fold_names
from ktopt.graph import ModuleGraph
from ktopt.plan import Plan, Step
from ktopt.plan_diff import compare_steps, transfer_changes


@dataclass(frozen=True)
class Difference:
    """What differs on one model: in words, and the modules concerned."""

    model: str
    words: tuple[str, ...]
    paths: frozenset[str]


def compared(graph: ModuleGraph, *plans: Plan) -> frozenset[str]:
    """The modules that own tensors, or that a plan replaces: what has to be alike."""
    found = {m.path for m in graph.modules if m.tensors}
    for plan in plans:
        found |= {step.path for step in plan.steps if step.operator != "default" or step.inside}
    return frozenset(found)


def difference(graph: ModuleGraph, old: Plan, new: Plan) -> Difference | None:
    """How the plans differ in operators, kwargs, devices and transfers; None where they don't.

    transfer_map is left out: ktopt derives transfers, which are compared instead.
    """
    matter = compared(graph, old, new)
    old, new = _without_transfer_maps(old), _without_transfer_maps(new)
    found: dict[str, list[str]] = {}
    for step, _, fields in compare_steps(old, new):
        if fields and step.path in matter:
            found.setdefault(", ".join(map(str, fields)), []).append(step.path)
    words = [f"{', '.join(fold_names(paths))}: {fields}" for fields, paths in found.items()]
    words += map(str, transfer_changes(old, new))
    return Difference(graph.name, tuple(words), frozenset(chain.from_iterable(found.values()))) if words else None


def _without_transfer_maps(plan: Plan) -> Plan:
    from dataclasses import replace

    return replace(plan, steps=tuple(_without(step) for step in plan.steps))


def _without(step: Step) -> Step:
    kwargs: Mapping[str, object] = step.kwargs
    if kwargs.get("transfer_map") is None:
        return step
    return step._replace(kwargs={**kwargs, "transfer_map": None})
