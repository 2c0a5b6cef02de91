"""The estimated time of a decoded token where a rule set itself says where everything is."""

from __future__ import annotations

from collections.abc import Mapping

from ktopt.graph import ModuleGraph
from ktopt.placement import Hardware
from ktopt.placing.problem import Assignment, Part, time_us
from ktopt.placing.units import make_case
from ktopt.plan_options import PlanOptions
from ktopt.ruleset import RuleSet
from ktopt.weights.source import StoredTensor


def token_time_us(
    ruleset: RuleSet,
    graph: ModuleGraph,
    hardware: Hardware,
    options: PlanOptions,
    stored: Mapping[str, StoredTensor] | None,
    context: int,
) -> float:
    """As `ktopt place` estimates it. What the rule set leaves open is where it takes least. KtoptError as make_case."""
    problem = make_case(ruleset, graph, hardware, options, stored, context).problem
    homes = tuple(_quickest(item.home) for item in problem.items)
    experts = tuple(None if item.experts is None else _quickest(item.experts) for item in problem.items)
    return time_us(problem, Assignment(homes, experts))


def _quickest(part: Part) -> int:
    return min(range(len(part.time_us)), key=part.time_us.__getitem__)
