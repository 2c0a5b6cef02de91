"""What messages say: words of the file that they are about, not Python's."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from apply_fixtures import make_model
from gguf_fixtures import make_gguf
from transformers import AutoModelForCausalLM

import ktopt
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.folder import save_folder
from ktopt.pattern import PatternError, compile_pattern
from ktopt.plan_diff import diff_plans
from ktopt.plan_json import PlanFileError, dump_plan, plan_from_json
from ktopt.source import SourceFile

MODEL = "smollm2-135m"


def rules(match: str, replace: str = "default") -> SourceFile:
    return SourceFile("r.yaml", f"version: 1\nrules:\n  - {{match: '{match}', replace: {replace}}}\n")


@pytest.fixture(scope="module")
def plan():
    return json.loads(dump_plan(ktopt.compile(rules("class=Linear", "KTransformersLinear"), MODEL)))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("steps", {"a": 1}, 'steps: must be a list, not {"a": 1}'),
        ("remap", ["cuda"], 'remap: must be an object, not ["cuda"]'),
        ("dtype", None, "dtype: must be a string, not null"),
        ("rules", [True], "rules[0]: must be an object, not true"),
    ],
)
def test_a_wrong_field_of_a_plan_is_told_in_json_s_words(plan, field, value, says):
    with pytest.raises(PlanFileError) as refused:
        plan_from_json({**plan, field: value}, "plan.json")
    assert says in str(refused.value)


def test_a_difference_is_told_as_yaml_has_it():
    plain = ktopt.compile(rules("@model.layers.*.mlp.down_proj"), MODEL)
    placed = ktopt.compile(rules("@model.layers.*.mlp.down_proj"), MODEL, device="cuda:0")
    shown = "\n".join(map(str, diff_plans(plain, placed).changes))
    assert "cpu -> cuda:0" in shown
    assert not any(word in shown for word in ("None", "True", "('", "{'"))


@pytest.mark.parametrize(
    ("match", "help"),
    [
        ("dtype=purple", "no module has dtype=purple; there are bfloat16"),
        ("class=Linear & config.nope=1", "smollm2-135m's config has no nope"),
        ("class=Linear & config.hidden_sizes=1", "did you mean config.hidden_size?"),
        ("class=Linear & config.hidden_size=1", "config.hidden_size of smollm2-135m is 576"),
    ],
)
def test_a_test_that_holds_nowhere_says_what_there_is(match, help):
    found = [d for d in ktopt.check(rules(match), MODEL) if d.code == "KT301"]
    assert len(found) == 1
    assert help in (found[0].help or "")


def test_a_long_pattern_is_called_long():
    with pytest.raises(PatternError, match="it is too long: 3,900 characters"):
        compile_pattern("a" * 3900)


def test_an_unknown_model_is_told_in_sentences():
    with pytest.raises(UsageError) as refused:
        ktopt.compile(rules("class=Linear"), "depseek-v3")
    first, second = str(refused.value).split("\n")
    assert first == "unknown model 'depseek-v3'; did you mean deepseek-v3?"
    assert second.startswith("A model is a folder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("words")
    model = make_model("llama")
    weights = make_gguf(place / "tiny.gguf", model, "F32")
    plan = ktopt.compile(rules("class=Linear", "KTransformersLinear"), str(weights), dtype="float32")
    return save_folder(plan, place / "out", weights), weights


def test_a_dtype_that_the_plan_has_not_is_ignored_with_a_warning(folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    AutoModelForCausalLM.from_pretrained(folder[0])
    AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.float32)
    assert "is ignored" not in caplog.text
    model = AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.bfloat16)
    assert "dtype=torch.bfloat16 is ignored: the plan in the folder was made for torch.float32" in caplog.text
    assert model.lm_head.weight.dtype == torch.float32


def test_weights_of_the_same_length_and_other_content_are_told_as_that(folder):
    made, weights = folder
    data = bytearray(weights.read_bytes())
    data[-1] ^= 255
    weights.write_bytes(data)
    with pytest.raises(KtoptError, match="as long, but with other content"):
        ktopt.load_model(made)
    weights.write_bytes(data + b"x")
    with pytest.raises(KtoptError, match=f"{len(data) + 1} bytes, was {len(data)}"):
        ktopt.load_model(made)
