"""Named selectors that name each other: cycles are said to be cycles, and one mistake is one finding."""

from __future__ import annotations

import time

from rulefiles import lines, validated


def messages(text: str) -> list[str]:
    return [d.message for d in validated(text)[1].sorted()]


def test_two_names_that_use_each_other_are_a_cycle():
    text = 'version: 1\nlet: {a: "$b", b: "$a"}\nrules:\n  - {match: "$a", replace: default}\n'
    assert messages(text) == ["let: these names go in a cycle: a -> b -> a"]


def test_a_name_that_uses_itself_is_a_cycle():
    text = 'version: 1\nlet: {a: "$a | class=Linear"}\nrules:\n  - {match: "$a", replace: default}\n'
    assert messages(text) == ["let: these names go in a cycle: a -> a"]


def test_a_name_used_above_its_line_is_said_once_for_all():
    chain = "".join(f'  a{i}: "$a{i + 1}"\n' for i in range(1500))
    text = f'version: 1\nlet:\n{chain}  a1500: "class=Linear"\nrules:\n  - {{match: $a0, replace: default}}\n'
    start = time.process_time()
    assert messages(text) == ["let: a0 uses $a1, which is given further down; 1499 more use a name too early"]
    assert time.process_time() - start < 3


def test_a_chain_that_is_too_deep_is_one_error():
    chain = "".join(f'  a{i}: "$a{i + 1}"\n' for i in reversed(range(1500)))
    text = f'version: 1\nlet:\n  a1500: "class=Linear"\n{chain}rules:\n  - {{match: $a0, replace: default}}\n'
    found = lines(validated(text)[1])
    assert [code for code, _ in found] == ["KT310"]


def test_a_cycle_of_many_is_told_shortly():
    ring = "".join(f'  a{i}: "$a{(i + 1) % 1500}"\n' for i in range(1500))
    found = messages(f"version: 1\nlet:\n{ring}rules:\n  - {{match: $a7, replace: default}}\n")
    assert found == ["let: these names go in a cycle: a0 -> a1 -> a2 -> a3 -> a4 -> a5 -> ... -> a0"]


def test_what_is_wrong_for_another_reason_is_said_beside_it():
    text = 'version: 1\nlet: {a: "$a", b: "$c"}\nrules:\n  - {match: "$a", replace: default}\n  - {match: $b, replace: default}\n'
    assert messages(text) == ["let: these names go in a cycle: a -> a", "selector, column 1: no `let` names $c"]


def test_names_above_are_used_as_before():
    text = 'version: 1\nlet: {a: "class=Linear", b: "$a & layer=0"}\nrules:\n  - {match: "$b", replace: default}\n'
    ruleset, report = validated(text)
    assert ruleset is not None
    assert not report.errors


def test_device_numbers_have_an_end():
    for device in ("cuda:99999999999", "cuda:1024"):
        text = f"- match: {{name: x}}\n  replace: {{class: default, kwargs: {{generate_device: '{device}'}}}}\n"
        assert messages(text) == [f'rule 1 kwargs.generate_device: "{device}" is not a device: numbers go up to 127']


def test_a_negative_device_number_is_not_taken_for_a_misspelt_one():
    text = "- match: {name: x}\n  replace: {class: default, kwargs: {generate_device: 'cuda:-1'}}\n"
    assert messages(text) == ['rule 1 kwargs.generate_device: "cuda:-1" is not a device']


def test_an_operator_of_no_known_package_is_just_unknown():
    text = "- match: {name: x}\n  replace: {class: os.system}\n"
    assert messages(text)[0].endswith('there is no operator "os.system"')


def test_a_rule_that_is_no_mapping_is_called_a_rule():
    assert messages("- a rule\n") == ['rule 1: a rule must be a mapping, not the string "a rule"']
