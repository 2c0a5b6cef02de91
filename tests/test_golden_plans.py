"""Rule sets that ship compile to the plans committed beside these tests, and check clean.

Versions are left out of the comparison. After a change that is meant, write them anew with KTOPT_UPDATE_GOLDEN=1.
"""

import json
import os
from pathlib import Path

import pytest

import ktopt
from ktopt.plan_json import dump_lock

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).parent / "golden"
SHIPPED = {
    "deepseek-v2-lite/24gb": "deepseek-v2-lite",
    "deepseek-v3/24gb": "deepseek-v3",
    "kimi-k2/24gb": "kimi-k2",
    "moonlight/24gb": "moonlight-16b-a3b",
    "smollm2/cpu": "smollm2-135m",
    "smollm2/reference": "smollm2-135m",
    "gemma3/cpu": "gemma-3-270m",
    "qwen3-moe/cpu": "qwen3-30b-a3b",
    "deepseek-v3/cpu": "moonlight-16b-a3b",
}


def test_every_shipped_rule_set_has_a_golden_plan() -> None:
    shipped = {str(path.relative_to(ROOT / "rules").with_suffix("")) for path in (ROOT / "rules").rglob("*.yaml")}
    assert shipped == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_rule_set_compiles_to_its_golden_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rules = f"rules/{name}.yaml"
    plan = ktopt.compile(rules, SHIPPED[name])
    golden = GOLDEN / f"{name.replace('/', '-')}.plan.json"
    text = dump_lock(plan)
    if os.environ.get("KTOPT_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert json.loads(text) == json.loads(golden.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_rule_set_checks_clean(name: str) -> None:
    report = ktopt.check(ROOT / f"rules/{name}.yaml", SHIPPED[name])
    assert [str(d) for d in report] == []
