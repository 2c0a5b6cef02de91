"""A model in hand keeps what it has (dtypes, hooks) or stays as it was; what comes back can be copied, pickled and saved."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from apply_fixtures import PROMPT, hand_plan, make_model, make_tokenizer
from gguf_fixtures import make_gguf
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoModelForCausalLM

import ktopt
from ktopt.applying import apply_plan
from ktopt.applying.hooks import Copies, MoveIn, install_transfers
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.folder import save_folder
from ktopt.plan import Transfer
from ktopt.runtime.generation import generate_stream
from ktopt.source import SourceFile

TEXT = """
- match: {name: layers, class: torch.nn.Linear}
  replace: {class: KTransformersLinear, kwargs: {generate_op: OP, prefill_op: KLinearTorch}}
- match: {name: rotary_emb}
  replace: {class: RotaryEmbedding}
"""
RULES = SourceFile("rules.yaml", TEXT.replace("OP", "KLinearTorch"))
CPU = SourceFile("rules.yaml", TEXT.replace("OP", "KLinearCPUInfer"))
UNCHANGED = SourceFile("rules.yaml", "- match: {name: '.*'}\n  replace: {class: default}\n")


def dtypes_of(model) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rules", [RULES, UNCHANGED], ids=["linear", "default"])
def test_a_converted_model_keeps_its_dtype(kind, dtype, rules):
    model = make_model(kind).to(dtype)  # its config still says float32
    before = dtypes_of(model)
    made = ktopt.apply(rules, model, device="cpu")
    assert dtypes_of(made) == before
    assert made.ktopt_plan.dtype == str(dtype).removeprefix("torch.")
    assert made.config.dtype == dtype


def test_mixed_dtypes_stay_mixed_where_no_operator_takes_over():
    model = make_model("llama").to(torch.bfloat16)
    model.model.norm.float()
    model.model.layers[1].mlp.float()
    before = dtypes_of(model)
    assert dtypes_of(ktopt.apply(UNCHANGED, model, device="cpu")) == before


def test_a_module_with_tensors_of_two_dtypes_keeps_both():
    model = make_model("qwen2_moe").to(torch.bfloat16)
    bias = model.model.layers[0].self_attn.q_proj.bias
    bias.data = bias.data.float()
    made = ktopt.apply(UNCHANGED, model, device="cpu")
    assert made.model.layers[0].self_attn.q_proj.bias.dtype == torch.float32
    assert made.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


def test_a_dtype_that_is_asked_for_wins():
    made = ktopt.apply(RULES, make_model("llama"), device="cpu", dtype="bfloat16")
    assert set(dtypes_of(made).values()) == {torch.bfloat16}


def test_float64_is_refused_by_name_and_converted_on_demand():
    model = make_model("llama").double()
    with pytest.raises(KtoptError, match=r"model\.embed_tokens\.weight is float64"):
        ktopt.apply(RULES, model, device="cpu")
    assert dtypes_of(model)["lm_head.weight"] == torch.float64
    assert set(dtypes_of(ktopt.apply(RULES, model, device="cpu", dtype="float32")).values()) == {torch.float32}


def parametrize(layer: nn.Module) -> None:
    parametrizations.weight_norm(layer.self_attn.q_proj)


def add_hook(layer: nn.Module) -> None:
    layer.self_attn.q_proj.register_forward_hook(lambda m, a, out: out * 2)


def add_pre_hook(layer: nn.Module) -> None:
    layer.self_attn.q_proj.register_forward_pre_hook(lambda m, a: (a[0] * 2,))


def set_forward(layer: nn.Module) -> None:
    layer.self_attn.q_proj.forward = lambda x: x


def remove_weight(layer: nn.Module) -> None:
    layer.self_attn.q_proj._parameters["weight"] = None


def add_parameter(layer: nn.Module) -> None:
    layer.self_attn.q_proj.lora = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("op", [RULES, CPU], ids=["torch", "cpu"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (parametrize, "lacks the parameter weight"),
        (add_hook, "a hook"),
        (add_pre_hook, "a hook"),
        (set_forward, "forward"),
        (remove_weight, "lacks the parameter weight"),
        (add_parameter, "lora"),
    ],
)
def test_what_an_operator_would_lose_stops_it_and_nothing_is_touched(change, named, op):
    model = make_model("llama")
    change(model.model.layers[2])
    modules = {path: id(module) for path, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KtoptError, match=rf"model\.layers\.2\.self_attn\.q_proj.*{named}"):
        ktopt.apply(op, model, device="cpu")
    assert {path: id(module) for path, module in model.named_modules()} == modules
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_hooks_of_modules_that_stay_go_on_working():
    model = make_model("llama")
    seen = []
    model.model.norm.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    parametrizations.weight_norm(model.lm_head)
    expected = model(PROMPT).logits
    made = ktopt.apply(RULES, model, device="cpu")
    assert torch.equal(made(PROMPT).logits, expected)
    assert len(seen) == 2


def test_recorded_outputs_are_still_recorded_after_a_replacement():
    model = make_model("mixtral")
    expected = model(PROMPT, output_router_logits=True, output_hidden_states=True)
    rules = SourceFile("r.yaml", "- match: {name: experts$}\n  replace: {class: KTransformersExperts}\n")
    made = ktopt.apply(rules, model, device="cpu", remap={"cuda": "cpu"})
    found = made(PROMPT, output_router_logits=True, output_hidden_states=True)
    assert [t.shape for t in found.router_logits] == [t.shape for t in expected.router_logits]
    assert [t.shape for t in found.hidden_states] == [t.shape for t in expected.hidden_states]


def test_a_model_in_training_comes_back_in_eval_mode():
    assert not ktopt.apply(RULES, make_model("llama").train(), device="cpu").training


@pytest.fixture(scope="module", params=["in hand", "from_pretrained", "blocks"])
def made(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("made")
    model = make_model("tied")
    file = make_gguf(place / "m.gguf", model, "Q8_0")
    if request.param == "in hand":
        return ktopt.apply(RULES, model, device="cpu")
    if request.param == "blocks":
        return ktopt.apply(CPU, model=file, device="cpu")
    return AutoModelForCausalLM.from_pretrained(save_folder(ktopt.compile(RULES, model, device="cpu"), place / "out", file))


def test_a_result_can_be_copied(made):
    copied = copy.deepcopy(made)
    assert copied.model.layers[0] is not made.model.layers[0]
    assert torch.equal(copied(PROMPT).logits, made(PROMPT).logits)
    assert copied.ktopt_plan == made.ktopt_plan


def test_a_result_can_be_pickled_for_another_process(made, tmp_path):
    (tmp_path / "model").write_bytes(pickle.dumps((made, PROMPT, made(PROMPT).logits)))
    code = (
        "import pickle, torch; model, prompt, logits = pickle.load(open('model', 'rb'));"
        "assert torch.equal(model(prompt).logits, logits); assert model.ktopt_plan.by_path['lm_head']"
    )
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True)


def test_save_pretrained_writes_a_plain_checkpoint(made, tmp_path):
    made.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain.model.layers[0].self_attn.q_proj) is nn.Linear
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    weight = made.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(plain.model.layers[0].self_attn.q_proj.weight, weight)


def test_transfers_survive_copying():
    model = make_model("llama")
    install_transfers(model, hand_plan(model, transfers=(Transfer("model.norm", "input", "cpu", "meta"),)))
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    (hook,) = copied.model.norm._forward_pre_hooks.values()
    assert isinstance(hook, MoveIn)
    assert isinstance(hook.copies, Copies)
    assert hook.device == torch.device("meta")


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers():
    model, tokenizer = make_model("llama"), make_tokenizer()
    apply_plan(hand_plan(model), model)
    with pytest.raises(UsageError, match="600 tokens, and the model's context is 512"):
        generate_stream(model, tokenizer, "a" * 600, 1)
    with pytest.raises(UsageError, match=r"500 tokens, which with 20 new ones exceeds .* of 512.*at most 12"):
        generate_stream(model, tokenizer, "a" * 500, 20)
    assert "".join(generate_stream(model, tokenizer, "a" * 509, 3, do_sample=False)) is not None
