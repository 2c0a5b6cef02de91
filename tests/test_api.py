"""The Python API, as a user writes it: rules or a plan, a model or a folder, weights."""

from __future__ import annotations

import pytest
import torch
from apply_fixtures import PROMPT, greedy, make_model, make_tokenizer
from gguf_fixtures import make_folder, make_gguf

import ktopt
from ktopt.diagnostics import CompileError, KtoptError, UsageError
from ktopt.operators.modules.experts import KTransformersExperts
from ktopt.operators.modules.linear import KTransformersLinear
from ktopt.plan_json import dump_plan

RULES = """\
version: 1
rules:
  - match: "@model.layers.*.self_attn.* & class=Linear"
    replace: KTransformersLinear
    kwargs: {generate_op: KLinearTorch, prefill_op: KLinearTorch}
  - match: "@model.layers.*.mlp.experts"
    replace: KTransformersExperts
    kwargs: {generate_op: KExpertsTorch, prefill_op: KExpertsTorch}
"""


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with weights and a tokenizer, and its model."""
    model = make_model("qwen3_moe")
    make_tokenizer().save_pretrained(make_folder(tmp_path / "hf", model))
    return tmp_path / "hf", model


def same(made, model) -> bool:
    assert isinstance(made.model.layers[0].self_attn.q_proj, KTransformersLinear)
    assert isinstance(made.model.layers[0].mlp.experts, KTransformersExperts)
    return torch.allclose(made(PROMPT).logits, model(PROMPT).logits, atol=1e-5) and greedy(made) == greedy(model)


def test_rules_and_a_folder(rules, folder):
    path, model = folder
    assert same(ktopt.apply(rules, path), model)
    assert same(ktopt.apply(str(rules), str(path / "config.json")), model)


def test_rules_a_config_and_weights_elsewhere(rules, folder, tmp_path):
    path, model = folder
    file = make_gguf(tmp_path / "weights.gguf", model)
    assert same(ktopt.apply(rules, path / "config.json", file), model)


def test_rules_and_a_gguf_file_alone(rules, tmp_path):
    model = make_model("qwen3_moe")
    assert same(ktopt.apply(rules, weights=make_gguf(tmp_path / "weights.gguf", model), dtype="float32"), model)


def test_rules_and_a_model_in_hand(rules):
    model, other = make_model("qwen3_moe"), make_model("qwen3_moe")
    assert ktopt.apply(rules, model) is model
    assert same(model, other)


def test_a_plan_in_memory_and_in_a_file(rules, folder, tmp_path):
    path, model = folder
    plan = ktopt.compile(rules, path)
    (tmp_path / "plan.json").write_text(dump_plan(plan))
    assert same(ktopt.apply(plan, weights=path), model)
    assert same(ktopt.apply(tmp_path / "plan.json", weights=path), model)


def test_load_model_with_rules_and_without(rules, folder):
    path, model = folder
    made, tokenizer = ktopt.load_model(path, rules)
    assert same(made, model)
    assert tokenizer("abc")["input_ids"] == make_tokenizer()("abc")["input_ids"]
    plain, _ = ktopt.load_model(path, device="cpu")
    assert torch.equal(plain(PROMPT).logits, model(PROMPT).logits)


def test_options_of_compile_are_passed_on(rules, folder):
    path, _ = folder
    assert ktopt.apply(rules, path, dtype="bfloat16").dtype == torch.bfloat16


def test_a_gpu_rule_file_runs_on_the_cpu_by_remap(tmp_path, folder):
    path, model = folder
    gpu = tmp_path / "gpu.yaml"
    gpu.write_text(
        "- match: {class: torch.nn.Linear, name: self_attn}\n"
        "  replace: {class: KTransformersLinear, kwargs: {generate_device: cuda, generate_op: KLinearMarlin}}\n"
        "- match: {name: mlp.experts$}\n"
        "  replace: {class: KTransformersExperts, kwargs: {generate_device: cpu, prefill_device: cuda, generate_op: KExpertsCPU}}\n"
    )
    assert same(ktopt.apply(gpu, path, remap={"cuda": "cpu"}), model)


def test_a_model_name_without_weights_is_refused(rules):
    with pytest.raises(UsageError, match="needs weights"):
        ktopt.apply(rules, "qwen3-30b-a3b")


def test_rules_without_a_model_are_refused(rules):
    with pytest.raises(UsageError, match="needs a model"):
        ktopt.apply(rules)


def test_options_beside_a_plan_are_refused(rules, folder, tmp_path):
    plan = ktopt.compile(rules, folder[0])
    (tmp_path / "plan.json").write_text(dump_plan(plan))
    for given in (plan, tmp_path / "plan.json"):
        with pytest.raises(UsageError, match="settles dtype already"):
            ktopt.apply(given, weights=folder[0], dtype="float16")


def test_wrong_rules_are_refused_with_their_findings(tmp_path, folder):
    path = tmp_path / "wrong.yaml"
    path.write_text("- match: {name: '['}\n  replace: {class: default}\n")
    with pytest.raises(CompileError, match="KT304"):
        ktopt.apply(path, folder[0])


def test_a_folder_without_a_tokenizer_is_refused_by_load_model(tmp_path):
    weights = make_folder(tmp_path / "hf", make_model())
    with pytest.raises(KtoptError, match="no tokenizer"):
        ktopt.load_model(weights)
