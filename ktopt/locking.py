"""The lock file of a rule file: the plan that it resolved to when it was last locked; what `ktopt check --locked` finds (KT604).

Every difference stands at the rule that now decides the module; what no rule decides, and a lock that can't be compared with,
stands at the start of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ktopt.diagnostics import Diagnostic, KtoptError, Severity
from ktopt.plan import Plan
from ktopt.plan_diff import Change, PlanDiff, diff_plans, fold
from ktopt.plan_json import dump_lock, plan_from_json, read_plan_json
from ktopt.source import FILE_START, Origin

if TYPE_CHECKING:
    from ktopt.ruleset import RuleSet

SHOWN = 3
"""How many differences a message lists; the others are counted."""


def lock_path(rules: str) -> Path:
    """Where a rule file's lock stands: cpu.yaml -> cpu.yaml.lock.json beside it."""
    return Path(rules + ".lock.json")


def check_lock(ruleset: RuleSet, plan: Plan) -> list[Diagnostic]:
    """KT604 for what differs between a plan and the one that the rule file is locked to."""
    path = lock_path(ruleset.path)
    start = Origin(ruleset.path, FILE_START)
    relock = f"`ktopt plan {ruleset.path} --model {plan.model.source or 'M'} --lock` locks the plan as it is now"
    if not path.exists():
        return [_finding(f"there is no lock file {path.name} to compare the plan with", start, relock)]
    try:
        if path.read_text(encoding="utf-8") == dump_lock(plan):
            return []
        locked = plan_from_json(read_plan_json(path), str(path))
    except (KtoptError, OSError, UnicodeDecodeError) as error:
        return [_finding(f"the lock file can't be read: {error}", start, relock)]
    difference = diff_plans(locked, plan)
    if locked.model.tree != plan.model.tree:
        models = f"it was locked for {locked.model.source}, and this is {plan.model.source}: their module trees differ"
        return [_finding(f"the resolved plan differs from {path.name}: {models}", start, relock)]
    return [
        _finding(f"the resolved plan differs from {path.name}: {_listed(lines)}", origin, relock)
        for origin, lines in _by_rule(difference, ruleset, plan, start).items()
    ]


def _finding(message: str, at: Origin, help: str) -> Diagnostic:
    return Diagnostic("KT604", Severity.ERROR, message, at.file, at.span, help=help)


def _listed(lines: list[str]) -> str:
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def _by_rule(difference: PlanDiff, ruleset: RuleSet, plan: Plan, start: Origin) -> dict[Origin, list[str]]:
    """What differs, by the rules that decide. Transfers follow from devices, and are told where nothing else is."""
    found: dict[Origin, list[str]] = {}
    for change in difference.changes:
        for rule, paths in _deciders(change, plan):
            origin = start if rule is None else ruleset.rules[rule].replace.origin
            found.setdefault(origin, []).extend(change.lines(paths))
    if difference.settings:
        found.setdefault(start, []).extend(line.removeprefix("~ ") for line in difference.settings)
    if not found:
        gone = [f"{path} is gone" for path in fold(difference.only_a)] + [f"{path} is new" for path in fold(difference.only_b)]
        lines = [*gone, *difference.transfers]
        return {start: lines} if lines else {}
    return found


def _deciders(change: Change, plan: Plan) -> Iterator[tuple[int | None, tuple[str, ...]]]:
    """The modules of a change, by the rule that decides them now: that of the closed module above, for those inside one."""
    by_rule: dict[int | None, list[str]] = {}
    for path in change.paths:
        step = plan.by_path[path]
        by_rule.setdefault((plan.by_path[step.inside] if step.inside else step).rule, []).append(path)
    return ((rule, tuple(paths)) for rule, paths in by_rule.items())
