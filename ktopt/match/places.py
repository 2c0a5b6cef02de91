"""The `place:` map of a native file: which device each module is given.

The first line that takes any of a module's paths places it. A module that KTransformers had once per layer (a rotary embedding) has
a path in every layer; where lines put those on several devices, the rules that took them get a copy of it on each.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.diagnostics import Report
from ktopt.graph import ModuleGraph
from ktopt.pattern import PatternError, PatternTimeout
from ktopt.ruleset import RuleSet
from ktopt.selector.surroundings import Surroundings
from ktopt.treeindex import index_of, members


@dataclass(frozen=True, slots=True)
class Placed:
    """devices  each module's device, None where no line takes it
    also     further devices of modules whose older paths lie on several, by module index
    takes    what each line selects, whatever the others do: a set of places; None where its pattern failed"""

    devices: list[str | None]
    also: dict[int, tuple[str, ...]]
    takes: list[int | None]


def place_modules(ruleset: RuleSet, graph: ModuleGraph, around: Surroundings, report: Report) -> Placed | None:
    """What the file's `place:` says of each module; None where it has none. A pattern that takes too long is a KT304."""
    if not ruleset.places:
        return None
    index = index_of(graph)
    devices: list[str | None] = [None] * index.places
    left = index.everywhere
    takes: list[int | None] = []
    for place in ruleset.places:
        try:
            taken = place.selector.evaluate_places(index, graph.config, around)
        except (PatternError, PatternTimeout) as error:
            report.error("KT304", f"place {place.device}: {error}", place.origin)
            takes.append(None)
            continue
        takes.append(taken)
        for at in members(taken & left):
            devices[at] = place.device
        left &= ~taken
    return _of_modules(ruleset, graph, devices, takes)


def _of_modules(ruleset: RuleSet, graph: ModuleGraph, devices: list[str | None], takes: list[int | None]) -> Placed:
    """Devices of places to devices of modules: of a module's paths, those that the first line took come first."""
    index = index_of(graph)
    order = {place.device: i for i, place in reversed(list(enumerate(ruleset.places)))}
    older: dict[int, dict[str, None]] = {}
    for offset, (module, _) in enumerate(index.aliases):
        device = devices[index.size + offset]
        if device is not None:
            older.setdefault(module, {})[device] = None
    also: dict[int, tuple[str, ...]] = {}
    for module, found in older.items():
        own = devices[module]
        ranked = sorted(found, key=lambda d: order[d])
        if own is None or order[ranked[0]] <= order[own]:
            devices[module] = ranked[0]
            if len(ranked) > 1:
                also[module] = tuple(ranked[1:])
    return Placed(devices[: index.size], also, takes)
