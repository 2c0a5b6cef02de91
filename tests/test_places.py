"""Lines of `place:` that take nothing, name too many layers or shadow each other; and `architectures:`."""

from __future__ import annotations

import pytest
import torch

import ktopt
from ktopt.graph import ModuleGraph
from ktopt.hardware import load_hardware
from ktopt.source import SourceFile

RULES = 'rules: [{match: "class=Linear", replace: KTransformersLinear}]\n'


def found(text: str, model: object = "smollm2-135m", **rest: object) -> list[tuple[str, str, int]]:
    report = ktopt.check(SourceFile("r.yaml", f"version: 1\n{text}{RULES}"), model, **rest)
    return [(d.code, str(d.severity), d.span.start.line) for d in report.sorted()]


def places(*lines: str) -> str:
    return "place:\n" + "".join(f"  {line}\n" for line in lines)


def test_a_place_that_takes_nothing_is_an_error_at_its_line() -> None:
    text = places('"cpu": "layer in 0..9"', '"cuda:1": "@model.layer.*"')
    report = ktopt.check(SourceFile("r.yaml", f"version: 1\n{text}{RULES}"), "smollm2-135m")
    (d,) = report.errors
    assert (d.code, d.span.start.line, d.help) == ("KT301", 4, "no path has layer; did you mean layers?")


def test_a_place_that_names_layers_beyond_the_model_is_an_error_at_its_line() -> None:
    assert ("KT306", "error", 3) in found(places('"cpu": "layer in 0..60"'))
    assert found(places('"cpu": "layer in 0.."')) == []


def test_a_place_that_earlier_ones_shadow_is_an_info_and_a_partly_shadowed_one_is_nothing() -> None:
    assert found(places('"cpu": "layer in 0..9"', '"cuda:0": "layer in 10..29"', '"cuda:1": "layer in 5..20"')) == [
        ("KT302", "info", 5)
    ]
    assert found(places('"cpu": "layer in 0..9"', '"cpu:0": "@**"').replace('"cpu:0"', '"cuda:0"')) == []


def test_a_place_for_some_machines_is_judged_over_all_of_them() -> None:
    text = places('"cuda:0": "layer in 0..9 & hw.cuda_sm >= 80"', '"cpu": "@model.layer & hw.cuda_sm < 80"')
    assert [f for f in found(text) if f[0] == "KT301"] == [("KT301", "error", 4)]


ARCHITECTURES = "architectures: [{}]\n"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("LlamaForCausalLM", "smollm2-135m"),
        ("Qwen2ForCausalLM, LlamaForCausalLM", "smollm2-135m"),
        ("DeepseekV3ForCausalLM", "kimi-k2"),
        ("KimiK2ForCausalLM", "kimi-k2"),
        ("deepseek_v3", "deepseek-v3"),
        ("KimiK2ForCausalLM", "deepseek-v3"),
    ],
)
def test_architectures_that_name_the_model_are_right(name: str, model: str) -> None:
    assert "KT311" not in {code for code, *_ in found(ARCHITECTURES.format(name), model)}


def test_architectures_of_another_model_are_an_error_that_names_this_ones() -> None:
    text = f"version: 1\n{ARCHITECTURES.format('DeepseekV3ForCausalLM')}{RULES}"
    (d,) = ktopt.check(SourceFile("r.yaml", text), "smollm2-135m").errors
    assert (d.code, d.span.start.line) == ("KT311", 2)
    assert d.message == "the file is for DeepseekV3ForCausalLM, and smollm2-135m is a LlamaForCausalLM"


def test_a_bare_module_has_no_architecture_to_judge() -> None:
    bare = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert found(ARCHITECTURES.format("DeepseekV3ForCausalLM"), bare) == []
    assert isinstance(ktopt.trees.load_tree(bare), ModuleGraph)


def test_a_place_on_a_device_that_the_machine_lacks_is_an_error_at_its_line() -> None:
    one_card = load_hardware("1x24GB")
    text = places('"cuda:0": "layer in 0..9"', '"cuda:1": "layer in 10..29"')
    report = ktopt.check(SourceFile("r.yaml", f"version: 1\n{text}{RULES}"), "smollm2-135m", hardware=one_card)
    assert {(d.code, d.span.start.line) for d in report.errors} == {("KT501", 4)}
    assert "`place:` puts modules on cuda:1" in report.errors[0].message


def test_a_default_device_that_the_machine_lacks_is_an_error_at_its_line() -> None:
    assert found('dtype: float32\ndefault_device: "cuda:1"\n', hardware=load_hardware("1x24GB"))[0][::2] == ("KT501", 3)


def test_a_rule_on_a_device_that_the_machine_lacks_is_an_error_at_the_kwarg() -> None:
    rule = 'rules:\n  - match: "class=Linear"\n    replace: default\n    kwargs:\n      generate_device: "cuda:1"\n'
    report = ktopt.check(SourceFile("r.yaml", f"version: 1\n{rule}"), "smollm2-135m", hardware=load_hardware("1x24GB"))
    assert {(d.code, d.span.start.line) for d in report.errors} == {("KT501", 6)}


LETS = 'let: {linears: "class=Linear", inner: "layer=3", outer: "$inner"}\n'


def test_a_let_that_nothing_uses_is_an_info() -> None:
    assert found(LETS + places('"cpu": "$linears"')) == [("KT209", "info", 2)]
    assert found(LETS + places('"cpu": "$linears | $outer"')) == []


def test_lets_of_a_file_without_rules_are_for_those_that_import_it() -> None:
    report = ktopt.check(SourceFile("r.yaml", f"version: 1\n{LETS}"))
    assert [d.code for d in report] == []
