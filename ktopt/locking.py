"""The lock file of a rule file: the plan that it resolved to when it was last locked; what `ktopt check --locked` finds (KT604).

Every difference stands at the rule that now decides the module; what no rule decides, and a lock that can't be compared with,
stands at the start of the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ktopt.diagnostics import Diagnostic, KtoptError, Severity
from ktopt.folding import fold_names
from ktopt.plan import Plan
from ktopt.plan_diff import PlanDiff, diff_plans
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
        for origin, lines in _by_rule(difference, ruleset, start).items()
    ]


def _finding(message: str, at: Origin, help: str) -> Diagnostic:
    return Diagnostic("KT604", Severity.ERROR, message, at.file, at.span, help=help)


def _listed(lines: list[str]) -> str:
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def _by_rule(difference: PlanDiff, ruleset: RuleSet, start: Origin) -> dict[Origin, list[str]]:
    """What differs, by the rules that decide. Transfers follow from devices, and are told where nothing else is."""
    found: dict[Origin, list[str]] = {}
    for rule in difference.rules:
        origin = start if rule.number is None else ruleset.rules[rule.number].replace.origin
        lines = [str(change) for change in rule.changes if change.fields]
        if lines:
            found.setdefault(origin, []).extend(lines)
    if difference.settings:
        found.setdefault(start, []).extend(map(str, difference.settings))
    if not found:
        gone = [f"{name} is gone" for name in fold_names(difference.only_a)]
        lines = [*gone, *(f"{name} is new" for name in fold_names(difference.only_b)), *map(str, difference.transfers)]
        return {start: lines} if lines else {}
    return found
