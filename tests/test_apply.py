"""A plan applied: the model computes what the original computes, and a plan that can't be carried out changes nothing."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from apply_fixtures import KINDS, PROMPT, StateSource, greedy, hand_plan, make_model, make_tokenizer, source_of
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, pipeline

from ktopt.applying import apply_plan
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.operators.modules.linear import KTransformersLinear

LINEAR = ("KTransformersLinear", {"generate_op": "KLinearTorch", "prefill_op": "KLinearTorch"})


def with_linears(model, **options):
    """A plan that replaces every plain linear outside of routers."""
    paths = [p for p, m in model.named_modules() if type(m) is nn.Linear]
    return hand_plan(model, operators=dict.fromkeys(paths, LINEAR), **options)


def snapshot(model) -> dict:
    """What a model consists of: modules by identity, values, hooks."""
    return {
        "modules": {path: id(module) for path, module in model.named_modules()},
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "training": model.training,
    }


def assert_unchanged(model, before) -> None:
    after = snapshot(model)
    assert after["modules"] == before["modules"]
    assert after["hooks"] == before["hooks"]
    assert all(torch.equal(tensor, after["state"][name]) for name, tensor in before["state"].items())
    assert not hasattr(model, "ktopt_plan")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_built_from_a_default_plan_equals_the_original(kind):
    model = make_model(kind)
    made = apply_plan(hand_plan(model), weights=source_of(model))
    assert torch.equal(made(PROMPT).logits, model(PROMPT).logits)
    assert greedy(made) == greedy(model)
    assert type(made) is type(model)
    assert not made.training


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_no_file_holds_equal_those_of_a_model_built_by_transformers(kind):
    model = make_model(kind)
    made = apply_plan(hand_plan(model), weights=source_of(model))
    buffers = dict(made.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffers[name], buffer), name
        assert buffers[name].dtype == buffer.dtype, name


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_linears_compute_the_same(kind):
    model = make_model(kind)
    made = apply_plan(with_linears(model), weights=source_of(model))
    assert isinstance(made.model.layers[0].self_attn.o_proj, KTransformersLinear)
    assert torch.equal(made(PROMPT).logits, model(PROMPT).logits)


def test_loading_in_bfloat16_equals_transformers_loading_in_bfloat16(tmp_path):
    model = make_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    made = apply_plan(hand_plan(model, dtype="bfloat16"), weights=source_of(model))
    for name, tensor in theirs.state_dict().items():
        assert made.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(made.state_dict()[name], tensor), name
    assert torch.equal(made(PROMPT).logits, theirs(PROMPT).logits)
    assert made.dtype == made.config.dtype == torch.bfloat16


def test_a_tied_head_stays_the_embedding():
    model = make_model("tied")
    made = apply_plan(hand_plan(model), weights=source_of(model))
    assert made.lm_head.weight is made.model.embed_tokens.weight


def test_a_tied_head_that_is_replaced_shares_the_embeddings_memory():
    model = make_model("tied")
    made = apply_plan(with_linears(model), weights=source_of(model))
    assert isinstance(made.lm_head, KTransformersLinear)
    assert made.lm_head.weight.data_ptr() == made.model.embed_tokens.weight.data_ptr()


def test_a_file_with_a_head_of_its_own_unties_it():
    model = make_model("tied")
    state = {**source_of(model).state, "lm_head.weight": torch.randn_like(model.lm_head.weight)}
    made = apply_plan(hand_plan(model), weights=StateSource(state))
    assert torch.equal(made.lm_head.weight, state["lm_head.weight"])
    assert torch.equal(made.model.embed_tokens.weight, state["model.embed_tokens.weight"])


def test_a_model_in_hand_is_changed_in_place_and_computes_the_same():
    model = make_model("qwen3_moe")
    expected, tokens = model(PROMPT).logits, greedy(model)
    plan = with_linears(model)
    assert apply_plan(plan, model) is model
    assert isinstance(model.model.layers[1].self_attn.q_proj, KTransformersLinear)
    assert torch.equal(model(PROMPT).logits, expected)
    assert greedy(model) == tokens
    assert model.ktopt_plan is plan


def test_a_tied_model_in_hand_stays_tied():
    model = make_model("tied")
    apply_plan(hand_plan(model, dtype="bfloat16"), model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_weights_given_for_a_model_in_hand_replace_its_own():
    model, other = make_model("llama", seed=0), make_model("llama", seed=1)
    apply_plan(hand_plan(model), model, source_of(other))
    assert torch.equal(model(PROMPT).logits, other(PROMPT).logits)


def test_progress_ends_at_the_whole():
    model = make_model("mixtral")
    events = []
    apply_plan(hand_plan(model), weights=source_of(model), progress=events.append)
    sizes = [event.done_bytes for event in events]
    assert sizes == sorted(sizes)
    assert sizes[-1] == events[0].total_bytes == sum(p.nbytes for p in model.parameters())
    assert len({event.tensor for event in events}) == len(model.state_dict())


def test_every_tensor_is_read_once():
    model = make_model("tied")
    source = source_of(model)
    apply_plan(with_linears(model), weights=source)
    assert sorted(source.reads) == sorted(source.state)


# --- what the result is good for -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    """An original and its optimized model."""
    model = make_model("qwen3_moe")
    return model, apply_plan(with_linears(model), weights=source_of(model))


BATCH = {
    "input_ids": torch.tensor([[257, 257, 11, 12, 13], [21, 22, 23, 24, 25]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
}


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "repetition_penalty": 1.5},
    ],
    ids=["greedy", "sampled", "beam", "static cache", "penalty"],
)
def test_generate_gives_the_originals_tokens_for_a_padded_batch(pair, options):
    texts = []
    for model in pair:
        torch.manual_seed(3)
        texts.append(model.generate(**BATCH, max_new_tokens=10, **options))
    assert torch.equal(*texts)
    assert len(set(texts[0][:, 5:].flatten().tolist())) > 2


def test_assisted_decoding_gives_the_greedy_text(pair):
    original, made = pair
    assistant = apply_plan(hand_plan(make_model("llama")), weights=source_of(make_model("llama")))
    text = made.generate(PROMPT, assistant_model=assistant, max_new_tokens=12, do_sample=False)
    assert text[0, 5:].tolist() == greedy(original)


def test_pipeline_generates_the_originals_text(pair):
    tokenizer = make_tokenizer()
    texts = [
        pipeline("text-generation", model=model, tokenizer=tokenizer)("hello there", max_new_tokens=8, do_sample=False)
        for model in pair
    ]
    assert texts[0] == texts[1]
    assert len(texts[0][0]["generated_text"]) > len("hello there")


# --- what is refused, with nothing touched ----------------------------------------------------------------------------------------


def refuse(model, plan, weights=None, **options) -> str:
    """The message of a refusal that must leave the model as it was."""
    before = snapshot(model)
    with pytest.raises(KtoptError) as caught:
        apply_plan(plan, model, weights, **options)
    assert_unchanged(model, before)
    return str(caught.value)


def test_a_plan_with_errors_is_refused_unless_forced():
    model = make_model()
    plan = replace(hand_plan(model), errors=("rules.yaml:3:5: KT301 error: matches nothing",))
    assert "KT301" in refuse(model, plan)
    assert apply_plan(plan, model, force=True).ktopt_plan is plan


def test_a_plan_without_model_or_weights_is_refused():
    with pytest.raises(UsageError, match="needs weights"):
        apply_plan(hand_plan(make_model()))


def test_a_plan_of_another_model_is_refused_naming_paths_and_classes():
    message = refuse(make_model("llama"), hand_plan(make_model("mixtral")))
    assert "model.layers.0.mlp.gate_proj: in the model, not in the plan" in message
    assert "the plan has transformers.models.mixtral" in message


def test_a_plan_of_another_size_is_refused_naming_what_differs():
    plan = hand_plan(make_model())
    other = make_model()
    other.resize_token_embeddings(400)
    assert "vocab_size: 320 in the plan, 400 in the model" in refuse(other, plan)


def test_a_device_that_is_not_here_is_refused_naming_it():
    model = make_model()
    plan = hand_plan(model, devices={"model.layers.2": "cuda:7", "lm_head": "npu:1"})
    message = refuse(model, plan)
    assert "cuda:7" in message
    assert "the first is model.layers.2" in message
    assert "npu:1" in message
    assert "--remap cuda=cpu" in message


def test_a_missing_tensor_is_refused_naming_tensor_file_and_rule():
    model = make_model()
    source = source_of(model)
    del source.state["model.layers.1.mlp.up_proj.weight"]
    message = refuse(model, with_linears(model), source)
    assert "model.layers.1.mlp.up_proj.weight" in message
    assert "weights.fake" in message
    assert "rules.yaml:7" in message
    assert source.reads == []


def test_a_tensor_of_another_shape_is_refused_naming_both_shapes():
    model = make_model()
    source = source_of(model)
    source.state["model.norm.weight"] = torch.ones(65)
    assert "model.norm.weight has shape [65] in the file, [64] in the model" in refuse(model, hand_plan(model), source)


def test_an_unknown_operator_is_refused_naming_the_rule():
    model = make_model()
    message = refuse(model, hand_plan(model, operators={"model.layers.0.mlp": ("NoSuchOperator", {})}))
    assert "rules.yaml:7" in message
    assert "model.layers.0.mlp" in message


def test_kwargs_that_the_operator_does_not_take_are_refused():
    model = make_model()
    message = refuse(model, hand_plan(model, operators={"lm_head": ("KTransformersLinear", {"wrong": 1})}))
    assert "wrong" in message
    assert "rules.yaml:7" in message


def test_an_operator_that_does_not_fit_is_refused():
    model = make_model()
    message = refuse(model, hand_plan(model, operators={"model.norm": LINEAR}))
    assert "model.norm: KTransformersLinear can't take it" in message


def test_a_failure_while_building_undoes_the_swaps_before_it(monkeypatch):
    model = make_model()
    plan = with_linears(model)
    built = []
    build = KTransformersLinear.build.__func__

    def fail_at_the_fifth(cls, original, context):
        built.append(context.step.path)
        if len(built) == 5:
            raise RuntimeError("no such kernel")
        return build(cls, original, context)

    monkeypatch.setattr(KTransformersLinear, "build", classmethod(fail_at_the_fifth))
    message = refuse(model, plan, source_of(model))
    assert "rules.yaml:7 (rule linear)" in message
    assert built[4] in message
    assert "no such kernel" in message


def test_a_failure_at_the_first_tensor_undoes_everything():
    model = make_model()
    source = source_of(model, fail_at="model.embed_tokens.weight")
    message = refuse(model, with_linears(model), source)
    assert "model.embed_tokens.weight" in message
    assert "the disk went away" in message
    assert "the model is as it was" in message


@pytest.mark.parametrize("error", [OSError("the disk went away"), MemoryError(), torch.OutOfMemoryError("no memory left")])
def test_a_failure_after_the_first_tensor_makes_the_model_unusable(error):
    model = make_model()
    source = source_of(model, fail_at="model.layers.1.mlp.down_proj.weight", error=error)
    with pytest.raises(KtoptError, match=r"rules.yaml:7.*model.layers.1.mlp.down_proj.weight"):
        apply_plan(with_linears(model), model, source)
    with pytest.raises(KtoptError, match=r"incomplete.*model.layers.1.mlp.down_proj.weight"):
        model.generate(PROMPT)


def test_an_interrupt_while_loading_makes_the_model_unusable_and_goes_on():
    model = make_model()
    source = source_of(model, fail_at="model.norm.weight", error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        apply_plan(hand_plan(model), model, source)
    with pytest.raises(KtoptError, match="incomplete"):
        model(PROMPT)


def test_an_optimized_model_takes_no_second_plan_of_the_original():
    model = make_model()
    plan = with_linears(model)
    apply_plan(plan, model)
    with pytest.raises(KtoptError, match="KTransformersLinear"):
        apply_plan(plan, model)


def test_a_plan_read_back_from_json_applies_alike():
    from ktopt.plan_json import dump_plan, plan_from_json

    model = make_model("mixtral")
    plan = plan_from_json(json.loads(dump_plan(with_linears(model))))
    assert torch.equal(apply_plan(plan, weights=source_of(model))(PROMPT).logits, model(PROMPT).logits)


def peak_while(work) -> int:
    """Bytes that the process's resident memory rises by at its peak while `work` runs."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system can't reset a process's peak memory")

    def status(key: str) -> int:
        return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    gc.collect()  # what earlier tests left isn't to be freed meanwhile
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_a_file_takes_the_plans_bytes_and_the_largest_tensor(tmp_path, dtype):
    config = LlamaConfig(vocab_size=32000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    plan = with_linears(model, dtype=dtype)
    item = torch.finfo(getattr(torch, dtype)).bits // 8
    planned = sum(p.numel() * item for p in model.parameters())
    largest = model.lm_head.weight.nbytes
    made = []
    rise = peak_while(lambda: made.append(apply_plan(plan, weights=tmp_path)))
    assert planned * 0.9 < rise < planned + largest + (16 << 20)
    assert torch.equal(made[0].lm_head.weight, model.lm_head.weight.to(made[0].dtype))
