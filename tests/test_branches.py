"""Rules that hold on some machines only: both branches of a file are checked, and neither is blamed for the other."""

from __future__ import annotations

import time

import pytest

import ktopt
from ktopt.diagnostics import Diagnostic
from ktopt.hardware import load_hardware
from ktopt.source import SourceFile
from ktopt.trees import load_tree

GPU, CPU = "1x24GB", "cpu"
IDIOM = """version: 1
rules:
  - {id: fast, match: "@model.layers.*.** & class=Linear", replace: KTransformersLinear, when: "hw.cuda_sm >= 80", expect: 210}
  - {id: plain, match: "@model.layers.*.** & class=Linear", replace: KTransformersLinear, expect: 210}
"""


def check(text: str, machine: str | None = None, model: str = "smollm2-135m", **rest: object) -> list[Diagnostic]:
    hardware = load_hardware(machine) if machine else None
    return ktopt.check(SourceFile("r.yaml", text), model, hardware=hardware, **rest).sorted()


def found(text: str, machine: str | None = None, **rest: object) -> list[tuple[str, str, int]]:
    return [(d.code, str(d.severity), d.span.start.line) for d in check(text, machine, **rest) if d.severity != "info"]


@pytest.mark.parametrize("machine", [None, GPU, CPU])
def test_a_fallback_is_blamed_on_no_machine_for_what_the_conditional_rule_takes(machine: str | None) -> None:
    assert found(IDIOM, machine) == []


def test_where_the_conditional_rule_holds_the_fallback_is_an_info() -> None:
    said = [d for d in check(IDIOM, GPU) if d.code == "KT302"]
    assert [(str(d.severity), d.span.start.line) for d in said] == [("info", 4)]
    assert [d for d in check(IDIOM, CPU) if d.code == "KT302"] == []


@pytest.mark.parametrize("machine", [None, GPU, CPU])
def test_a_fallback_that_expects_a_wrong_number_is_wrong_everywhere(machine: str | None) -> None:
    (wrong,) = (d for d in check(IDIOM.replace("Linear, expect: 210", "Linear, expect: 209"), machine) if d.code == "KT307")
    assert (wrong.span.start.line, "expect" in (wrong.help or ""), "210" in wrong.message) == (4, False, True)


@pytest.mark.parametrize("machine", [None, GPU])
def test_an_expected_number_may_count_what_the_conditional_rule_leaves(machine: str | None) -> None:
    text = """version: 1
rules:
  - {match: "@model.layers.0.** & class=Linear", replace: KTransformersLinear, when: "hw.cuda_sm >= 80", expect: 7}
  - {match: "@model.layers.*.** & class=Linear", replace: KTransformersLinear, expect: 203}
"""
    assert found(text, machine) == []


def test_a_rule_that_is_dead_on_every_machine_is_an_error_without_one() -> None:
    text = """version: 1
rules:
  - {match: "class=Linear", replace: KTransformersLinear, when: "hw.cuda_sm >= 80"}
  - {match: "class=Linear", replace: KTransformersLinear, when: "hw.cuda_sm < 80"}
  - {match: "class=Linear & layer=3", replace: KTransformersLinear}
"""
    assert found(text) == [("KT302", "error", 5)]
    assert "KT302" not in {code for code, *_ in found(text.replace("< 80", "< 70"))}


def test_conditions_of_several_rules_are_looked_at_together() -> None:
    text = """version: 1
rules:
  - {match: "class=Linear", replace: KTransformersLinear, when: "hw.cuda_sm >= 80"}
  - {match: "class=Linear", replace: KTransformersLinear, when: "hw.cpu.amx"}
  - {match: "class=Linear", replace: KTransformersLinear, when: "hw.ram >= 64GB"}
  - {match: "class=Linear", replace: KTransformersLinear, expect: 211}
""".replace('"hw.cpu.amx"', '"hw.cpu.amx=true"')
    assert found(text) == []
    assert found(text.replace("expect: 211", "expect: 1")) == [("KT307", "error", 6)]


@pytest.mark.parametrize("condition", ["hw.cuda_sm >= 80", "!(hw.cuda_sm >= 80)"])
def test_an_operator_that_does_not_fit_is_found_in_either_branch_without_a_machine(condition: str) -> None:
    text = f"""version: 1
rules:
  - {{match: "@model.layers.*.mlp", replace: default, when: "{condition}"}}
  - {{match: "@model.layers.*.mlp", replace: KTransformersLinear}}
"""
    (wrong,) = (d for d in check(text) if d.code == "KT407")
    assert wrong.span.start.line == 4
    assert ("does not hold" in wrong.message) == (condition[0] == "h")


@pytest.mark.parametrize("machine", [None, GPU, CPU])
def test_a_selector_that_asks_for_a_machine_is_not_said_to_match_nothing(machine: str | None) -> None:
    text = 'version: 1\nrules: [{match: "class=Linear & hw.cuda_sm >= 80", replace: KTransformersLinear, expect: 211}]\n'
    assert found(text, machine) == []
    assert found(text.replace("class=Linear", "class=Linaer"), machine)[0][0] == "KT301"


def test_a_rule_shadowed_by_a_selector_for_this_machine_is_an_info() -> None:
    text = """version: 1
rules:
  - {match: "class=Linear & hw.cuda_sm >= 80", replace: KTransformersLinear}
  - {match: "class=Linear", replace: KTransformersLinear, expect: 211}
"""
    assert found(text, GPU) == found(text, CPU) == found(text) == []


def test_layers_that_only_the_other_branch_covers_are_no_gap() -> None:
    text = """version: 1
rules:
  - {match: "layer in 0..9 & class=Linear", replace: KTransformersLinear}
  - {match: "layer in 10..29 & class=Linear", replace: KTransformersLinear, when: "hw.cuda_sm >= 80"}
"""
    assert found(text) == []
    assert found(text, CPU) == [("KT309", "warning", 3)]
    (gap,) = (d for d in check(text.replace("10..29", "10..20")) if d.code == "KT309")
    assert "layers 21-29" in gap.message


def test_the_plan_follows_the_rule_that_may_hold_and_says_what_is_not_known() -> None:
    compilation = ktopt.compiler.run_stages(SourceFile("r.yaml", IDIOM), "smollm2-135m")
    assert compilation.matches is not None
    assert compilation.plan is not None
    assert compilation.matches.needs_hardware == (0,)
    assert compilation.plan.by_path["model.layers.3.mlp.up_proj"].rule == 0
    assert any("--hardware" in note for note in compilation.plan.notes)


SLOW = "^(([a-z_.0-9])+.)+[A-Z]([a-z])+$"


@pytest.mark.parametrize(
    "text",
    [
        f"version: 1\nrules: [{{match: {{name: '{SLOW}'}}, replace: default, expect: 3}}]\n",
        f"version: 1\nrules: [{{match: {{name: '{SLOW}'}}, replace: default, when: 'hw.cuda_sm >= 80'}}]\n",
        f"- match: {{name: '{SLOW}'}}\n  replace: {{class: default}}\n",
        f"- {{match: {{name: '.'}}, replace: {{class: default}}}}\n- match: {{name: '{SLOW}'}}\n  replace: {{class: default}}\n",
    ],
)
def test_a_pattern_that_takes_too_long_is_that_and_nothing_else_within_a_second(text: str) -> None:
    graph = load_tree("deepseek-v3")
    start = time.process_time()
    report = ktopt.check(SourceFile("r.yaml", text), graph)
    assert time.process_time() - start < 1
    assert [d.code for d in report] == ["KT304"]
