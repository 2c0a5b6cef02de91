"""The Python API, called wrongly: every mistake is a UsageError in a sentence, and what is plainly meant is taken."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

import ktopt
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.source import SourceFile

RULES = SourceFile("rules.yaml", "version: 1\nrules:\n  - {match: 'class=Linear', replace: KTransformersLinear}\n")
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def plan():
    return ktopt.compile(RULES, MODEL)


def test_a_config_of_transformers_is_a_model():
    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=100)
    assert ktopt.compile(RULES, config).model == ktopt.compile(RULES, config.to_dict()).model


def test_torch_s_devices_and_dtypes_are_taken():
    made = ktopt.compile(RULES, MODEL, device=torch.device("cpu"), dtype=torch.float32)
    assert made == ktopt.compile(RULES, MODEL, device="cpu", dtype="float32")


def test_what_the_command_line_writes_is_taken_too():
    made = ktopt.compile(RULES, MODEL, remap="cuda=cpu,npu=cpu", hardware="1x24GB")
    assert made.remap == {"cuda": "cpu", "npu": "cpu"}
    assert made.hardware == "1x24GB"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": 5}, 'a device is a name such as "cpu"'),
        ({"device": "gpu"}, "'gpu' is not a device"),
        ({"dtype": 16}, "dtype is a name"),
        ({"dtype": torch.int8}, "'int8' is not one of"),
        ({"remap": 5}, "remap is a mapping"),
        ({"remap": "cuda"}, "write FROM=TO"),
        ({"remap": {"cuda": 0}}, "a device is a name"),
        ({"hardware": 5}, "hardware is"),
        ({"hardware": "nope"}, "no such file, and no preset"),
        ({"hardware": "x" * 5000}, "can't be read"),
        ({"weights": 5}, "weights are a path"),
        ({"weights": ""}, "path is empty"),
        ({"devise": "cpu"}, "did you mean device"),
        ({"plan": False}, "there is no option 'plan'"),
    ],
)
@pytest.mark.parametrize("function", [ktopt.check, ktopt.compile])
def test_an_option_that_can_t_be_meant(function, options, says):
    with pytest.raises(UsageError) as refused:
        function(RULES, MODEL, **options)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("rules", "says"),
    [(None, "not None"), (5, "not 5"), ([], "yaml.safe_dump"), ({"rules": []}, "yaml.safe_dump"), ("", "empty"), (b"x", "bytes")],
)
def test_rules_that_are_none(rules, says):
    for function in (ktopt.check, ktopt.compile):
        with pytest.raises(UsageError) as refused:
            function(rules, MODEL)
        assert says in str(refused.value)


@pytest.mark.parametrize("model", [5, LlamaConfig, {1, 2}, "", "nope", "a\0b", "./nope.gguf"])
def test_models_that_are_none(model):
    with pytest.raises(UsageError):
        ktopt.compile(RULES, model)


def test_a_plan_needs_a_model():
    with pytest.raises(UsageError, match="a plan needs a model"):
        ktopt.compile(RULES, None)


def test_apply_and_load_model_refuse_what_they_can_t_use(plan):
    for call, says in (
        (lambda: ktopt.apply(None), "what is to be applied"),
        (lambda: ktopt.apply(5), "rules are the path"),
        (lambda: ktopt.apply(plan), "apply needs weights"),
        (lambda: ktopt.apply(plan, 5), "a model is"),
        (lambda: ktopt.apply(plan, weights=5), "weights are a path"),
        (lambda: ktopt.apply(plan, weights="w", devise="cpu"), "did you mean device"),
        (lambda: ktopt.apply(plan, weights="w", progress=5), "progress is a function"),
        (lambda: ktopt.load_model(None), "which model"),
        (lambda: ktopt.load_model(5), "a model is"),
        (lambda: ktopt.load_model("x" * 5000), "can't be read"),
        (lambda: ktopt.load_model(MODEL, foo=1), "there is no option 'foo'"),
    ):
        with pytest.raises(KtoptError) as refused:
            call()
        assert says in str(refused.value)
