"""Rule sets that ship compile to the plans committed beside these tests, check clean, and fit the machines that they are for.

Versions are left out of the comparison. After a change that is meant, KTOPT_UPDATE_GOLDEN=1 writes the plans anew, and what the
sets' comments, the README and docs/rule-sets.md say of memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shipped_sets import FOR, fitted, golden_text, needs_comment, readme_table, sets_table, tree, with_needs, with_table

import ktopt
from ktopt.choosing.sets import ShippedSet, shipped_rules, shipped_sets

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).parent / "golden"
UPDATE = bool(os.environ.get("KTOPT_UPDATE_GOLDEN"))


def same_as_file(path: Path, text: str) -> None:
    """The file has this text, or is given it where golden files are to be updated."""
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_every_name_of_a_set_has_a_golden_plan_and_no_plan_is_left_over() -> None:
    assert {name for name in shipped_rules() if not name.startswith("deepseek-r1/")} == set(FOR)
    assert {path.name for path in GOLDEN.iterdir()} == {golden_name(name) for name in FOR}


def golden_name(name: str) -> str:
    return f"{name.replace('/', '-')}.json"


@pytest.mark.parametrize("name", FOR)
def test_a_shipped_rule_set_compiles_to_its_golden_plan(name: str) -> None:
    plan = fitted(name).plan
    assert plan is not None
    same_as_file(GOLDEN / golden_name(name), golden_text(plan))


@pytest.mark.parametrize("name", FOR)
def test_a_shipped_rule_set_checks_clean_and_fits_its_machine(name: str) -> None:
    found = fitted(name)
    hardware = found.shipped.machine
    report = ktopt.check(found.shipped.path, tree(FOR[name]), hardware=hardware)
    assert [str(d) for d in report if d.severity.value in ("warning", "error")] == []
    assert found.reason == ""
    assert found.longest >= min(16384, tree(FOR[name]).config["max_position_embeddings"])


@pytest.mark.parametrize("shipped", shipped_sets(), ids=lambda each: each.name)
def test_a_set_s_comment_says_what_it_takes(shipped: ShippedSet) -> None:
    same_as_file(shipped.path, with_needs(shipped.text(), needs_comment(shipped)))


@pytest.mark.parametrize(("page", "table"), [("README.md", readme_table), ("docs/rule-sets.md", sets_table)])
def test_a_page_s_table_says_what_sets_take(page: str, table: object) -> None:
    made = table()  # type: ignore[operator]
    path = ROOT / page
    assert made.split("\n", 1)[0] in path.read_text(encoding="utf-8")
    same_as_file(path, with_table(path.read_text(encoding="utf-8"), made))
