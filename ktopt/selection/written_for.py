"""Operators that were written for another model family than the one at hand, where there is one for it."""

from __future__ import annotations

from ktopt import registry
from ktopt.diagnostics import Report
from ktopt.graph import ModuleGraph
from ktopt.match import Matches
from ktopt.operator import OperatorSpec
from ktopt.selection.families import in_words
from ktopt.treeindex import members


def is_for(operator: OperatorSpec, graph: ModuleGraph) -> bool:
    """Whether an operator was written for a model's family; one that names no families was for all."""
    return not operator.families or not graph.model_type or graph.model_type in operator.families


def check_families(matches: Matches, report: Report) -> None:
    """KT407 as a warning: transformers computes the module all the same, but KTransformers would not have."""
    graph = matches.graph
    for rule in matches.ruleset.rules:
        operator, won = rule.replace.operator, members(matches.won(rule.index))
        if is_for(operator, graph) or matches.active[rule.index] is False or not won:
            continue
        fitting = [i for i in won if operator.fits(graph.modules[i])]
        right = _for(graph, operator) if fitting else None
        if right is not None:
            families = ", ".join(operator.families)
            what = f"takes {in_words(graph, fitting)} of a {graph.model_type}"
            message = f"rule {rule.number}: {operator.name} was written for {families}, and {what}"
            report.warning(
                "KT407", message, rule.replace.origin, help=f"write {right.name}; either is computed by transformers here"
            )


def _for(graph: ModuleGraph, operator: OperatorSpec) -> OperatorSpec | None:
    """The operator of the same roles that was written for the model's family, if there is one."""
    known = [s for s in registry.specs() if s.roles == operator.roles and graph.model_type in s.families and not s.lost]
    return min(known, key=lambda spec: (spec.families[0] != graph.model_type, len(spec.families), len(spec.name)), default=None)
