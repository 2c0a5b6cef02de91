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
        report.error("KT507", f"a cache of {context:,} tokens doesn't fit: {error}", _origin(ruleset, ""))
        return
    for device, message, help in found:
        report.error("KT507", message, _origin(ruleset, device), help=help)


def _origin(ruleset: RuleSet, device: str) -> Origin:
    """The line of `place:` that names a device, or the file's beginning."""
    line = next((place.origin for place in ruleset.places if place.device == device), None)
    return line or ruleset.default_device_origin or ruleset.origin or Origin(ruleset.path, FILE_START)
