"""Whether two rule files resolve alike on a model: compiles both and compares the plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktopt.graph import ModuleGraph
from ktopt.plan import Plan, Step
from ktopt.plan_diff import PlanDiff, diff_plans, fold


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
    found: PlanDiff = diff_plans(_without_transfer_maps(old), _without_transfer_maps(new))
    words: list[str] = []
    paths: set[str] = set()
    for change in found.changes:
        there = [path for path in change.paths if path in matter]
        if there:
            paths.update(there)
            words.append(f"{', '.join(fold(there))}: {change.field} {change.before} -> {change.after}")
    words += found.transfers
    return Difference(graph.name, tuple(words), frozenset(paths)) if words else None


def _without_transfer_maps(plan: Plan) -> Plan:
    from dataclasses import replace

    return replace(plan, steps=tuple(_without(step) for step in plan.steps))


def _without(step: Step) -> Step:
    kwargs: Mapping[str, object] = step.kwargs
    if kwargs.get("transfer_map") is None:
        return step
    return step._replace(kwargs={**kwargs, "transfer_map": None})
