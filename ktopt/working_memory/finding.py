"""KT507: a context that a machine has no room for."""

from __future__ import annotations

from collections.abc import Mapping

from ktopt.diagnostics import KtoptError, Report
from ktopt.graph import ModuleGraph
from ktopt.placement import Hardware
from ktopt.plan import Plan
from ktopt.ruleset import RuleSet
from ktopt.source import FILE_START, Origin
from ktopt.weights.source import StoredTensor
from ktopt.working_memory.asked import memory_of


def check_context(
    plan: Plan,
    ruleset: RuleSet,
    hardware: Hardware,
    context: int,
    batch: int,
    report: Report,
    graph: ModuleGraph | None = None,
    stored: Mapping[str, StoredTensor] | None = None,
) -> None:
    """Report each device that would hold more than it has, at the line that puts modules there."""
    try:
        found = list(memory_of(plan, context, batch, hardware=hardware, graph=graph, stored=stored).findings())
    except KtoptError as error:  # a cache of blocks
        report.error("KT507", f"a cache of {context:,} tokens doesn't fit: {error}", _origin(plan, ruleset, ""))
        return
    for device, message, help in found:
        report.error("KT507", message, _origin(plan, ruleset, device), help=help)


def _origin(plan: Plan, ruleset: RuleSet, device: str) -> Origin:
    """Where the file puts most of what a device holds: a rule, its line of `place:`, or the file's beginning."""
    line = next((place.origin for place in ruleset.places if place.device == device), None)
    other = line or ruleset.default_device_origin or ruleset.origin or Origin(ruleset.path, FILE_START)
    filled: dict[Origin, int] = {}
    for step in plan.steps:
        if held := step.held_bytes.get(device, 0):
            origin = _kwarg(ruleset, step.rule) or other
            filled[origin] = filled.get(origin, 0) + held
    return max(filled, key=filled.__getitem__, default=other)


def _kwarg(ruleset: RuleSet, number: int | None) -> Origin | None:
    """Where a rule says itself on which device its modules are."""
    if number is None or number >= len(ruleset.rules):  # such as the rule of --mode long_context
        return None
    replace = ruleset.rules[number].replace
    given = next((name for name in ("generate_device", "device") if name in replace.given), None)
    return replace.kwarg_origins.get(given, replace.origin) if given else None
