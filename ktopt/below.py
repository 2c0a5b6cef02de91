"""Operators that run what stands below them, such as a whole decoder layer: whether they can or do, over what is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ktopt.diagnostics import Report
from ktopt.graph import ITEM_BYTES, ModuleGraph
from ktopt.match import Matches
from ktopt.plan import Step
from ktopt.registry import find
from ktopt.ruleset import RuleSet
from ktopt.weights.source import StoredTensor


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


def in_two_pieces(steps: tuple[Step, ...], graph: ModuleGraph, stored: Mapping[str, StoredTensor]) -> tuple[Step, ...]:
    """The rows of a plan in which what an operator keeps of a child's weight in two pieces counts with its bytes in the file."""
    if not any(tensor.in_two for tensor in stored.values()):
        return steps
    made = list(steps)
    for step in steps:
        spec = find(step.operator)
        child = graph.by_path.get(f"{step.path}.{spec.takes_two}") if spec is not None and spec.takes_two else None
        if child is None:
            continue
        row, found = made[child.index], stored.get(f"{child.path}.weight")
        own = find(row.operator)
        asked = str(row.kwargs.get("generate_op", ""))
        op = own.ops.get(row.runs.get(asked, (asked, ""))[0]) if own is not None else None
        if found is not None and found.in_two and op is not None and set(found.types) <= set(op.keeps):
            less = prod(found.shape) * ITEM_BYTES[row.dtype] - found.nbytes
            made[child.index] = row._replace(weight_bytes=row.weight_bytes - less, stored=tuple(dict.fromkeys(found.types)))
    return tuple(made)
