"""Operators that run what stands below them, such as a whole decoder layer: whether they can or do, over what is planned."""

from __future__ import annotations

from collections.abc import Sequence

from ktopt.diagnostics import Report
from ktopt.graph import ModuleGraph
from ktopt.match import Matches
from ktopt.plan import Step
from ktopt.ruleset import RuleSet


def check_below(ruleset: RuleSet, graph: ModuleGraph, matches: Matches, steps: Sequence[Step], report: Report) -> None:
    """KT407: operators that can't stand over what the plan makes of the modules below theirs; once for a rule and a reason."""
    refused: dict[tuple[int, str], list[str]] = {}
    asking = {index: rule.replace.operator.refuses_below for index, rule in enumerate(ruleset.rules)}
    for module, step, decision in zip(graph.modules, steps, matches.decisions, strict=True):
        if decision.rule is None or (refuses := asking[decision.rule]) is None:
            continue
        if reason := refuses(module, step, steps[module.index + 1 : module.end], graph.config):
            refused.setdefault((decision.rule, reason.replace(step.path, "")), []).append(f"{step.path}: {reason}")
    for (index, _), reasons in refused.items():
        rule = ruleset.rules[index]
        more = f", and {len(reasons) - 1} more alike" if len(reasons) > 1 else ""
        report.error(
            "KT407",
            f"rule {rule.number}: {rule.replace.operator.name} can't take {reasons[0]}{more}",
            rule.replace.origin,
            help="narrow the match, or change what the rules make of the modules below",
        )


def noted_below(ruleset: RuleSet, graph: ModuleGraph, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The rows, with a note at each module that its operator leaves as it is over what stands below it."""
    asking = {index: rule.replace.operator.leaves for index, rule in enumerate(ruleset.rules) if rule.replace.operator.leaves}
    if not asking:
        return steps
    made = list(steps)
    for module, step in zip(graph.modules, steps, strict=True):
        leaves = None if step.rule is None else asking.get(step.rule)
        if leaves is not None and (reason := leaves(steps[module.index + 1 : module.end])):
            made[module.index] = step._replace(notes=(*step.notes, f"left as it is: {reason}"))
    return tuple(made)
