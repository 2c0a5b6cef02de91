"""All patterns of one run share a second: many that each stay within their own budget can't take minutes together."""

from __future__ import annotations

import time

import pytest

import ktopt
from ktopt.cli import main
from ktopt.pattern import PatternTimeout, compile_pattern, shared_budgets

BACKTRACKS = "(?:[a-z_.0-9]{1,20}){1,50}[!?]"
PATH = "model.layers.30.self_attn.kv_a_proj_with_mqa"


@pytest.fixture
def many(tmp_path):
    """A list file with sixty rules whose patterns backtrack, each another one, and one rule that is fine."""
    rules = [f"- match: {{name: '{BACKTRACKS}{i}'}}\n  replace: {{class: default}}\n" for i in range(60)]
    rules.append("- match: {name: '^model\\.layers\\.[0-9]\\.mlp$'}\n  replace: {class: default}\n")
    path = tmp_path / "many.yaml"
    path.write_text("".join(rules))
    return path


def test_sixty_patterns_that_backtrack_take_a_second_together_and_are_said_once_each(many):
    start = time.process_time()
    report = ktopt.check(str(many), "deepseek-v3")
    assert time.process_time() - start < 4
    assert [d.code for d in report] == ["KT304"] * 60
    assert any("was given up" in d.message for d in report)


def test_the_command_finds_what_the_function_does(many, capsys):
    assert main(["check", str(many), "--model", "deepseek-v3", "--format", "concise"]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if " KT" in line]
    assert len(found) == 60
    assert all("KT304" in line for line in found)


def search_until_refused(text: str) -> None:
    pattern = compile_pattern(text)
    while True:
        pattern.search(PATH)


def test_a_run_that_spent_its_second_says_so_of_the_next_pattern():
    with shared_budgets():
        for i in range(3):
            with pytest.raises(PatternTimeout):
                search_until_refused(f"{BACKTRACKS}{i}")
        with pytest.raises(PatternTimeout, match="together") as given_up:
            compile_pattern(r"layers\..*\.mlp").search(PATH)
        assert not given_up.value.own


def test_the_next_run_begins_anew():
    with shared_budgets(), pytest.raises(PatternTimeout):
        search_until_refused(BACKTRACKS)
    with shared_budgets():
        assert compile_pattern(r"layers\..*\.kv").search("model.layers.3.self_attn.kv_a_proj")
