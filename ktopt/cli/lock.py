"""The lock file of a rule file: the plan that it resolved to when it was last locked."""

from __future__ import annotations

import sys
from pathlib import Path

from ktopt.diagnostics import KtoptError
from ktopt.plan import Plan


def lock_path(rules: str) -> Path:
    """Where a rule file's lock stands: cpu.yaml -> cpu.yaml.lock.json beside it."""
    return Path(rules + ".lock.json")


def lock_differences(rules: str, plan: Plan) -> list[str]:
    """What differs from the locked plan, as lines; none where the plan is as locked. KtoptError where there is no readable lock."""
    from ktopt.plan_diff import diff_plans
    from ktopt.plan_json import dump_lock, plan_from_json, read_plan_json

    path = lock_path(rules)
    if not path.exists():
        raise KtoptError(f"{path}: no lock file; `ktopt plan {rules} --model M --lock` writes it")
    if path.read_text(encoding="utf-8") == dump_lock(plan):
        return []
    locked = plan_from_json(read_plan_json(path), str(path))
    difference = diff_plans(locked, plan)
    lines = [] if difference.empty else difference.render().splitlines()
    if locked.model.tree != plan.model.tree:
        lines.insert(0, f"locked for {locked.model.source}, planned for {plan.model.source}: their module trees differ")
    return [f"{path}: the plan differs from the locked one:", *(f"  {line}" for line in lines)] if lines else []


def differs_from_lock(rules: str, plan: Plan) -> bool:
    """Whether a plan differs from the locked one; prints to stderr how."""
    differences = lock_differences(rules, plan)
    for line in differences:
        print(line, file=sys.stderr)
    return bool(differences)
