"""Weights, plans and folders of another model are refused, by name, before anything is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from apply_fixtures import PROMPT, make_model
from gguf_fixtures import make_folder, make_gguf, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ktopt
from ktopt.applying.same_model import check_unused
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.folder import save_folder
from ktopt.plan_json import dump_plan
from ktopt.source import SourceFile
from ktopt.trees import load_tree
from ktopt.weights.agreement import config_contradictions
from ktopt.weights.open import open_weights

RULES = SourceFile(
    "rules.yaml",
    "- match: {name: layers, class: torch.nn.Linear}\n"
    "  replace: {class: KTransformersLinear, kwargs: {generate_op: KLinearTorch, prefill_op: KLinearTorch}}\n",
)


@pytest.fixture
def llama():
    return make_model("llama")


def edit(folder: Path, change) -> None:
    """Rewrite a folder's tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, change) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_tensors_that_no_parameter_takes_are_refused_by_kind(llama, tmp_path):
    folder = make_folder(tmp_path / "hf", llama)
    edit(folder, lambda t: t.update({f"model.layers.{i}.self_attn.q_proj.bias": torch.zeros(64) for i in range(3)}))
    with pytest.raises(KtoptError, match=r"layers\.\*\.self_attn\.q_proj\.bias: 3 tensors.*model\.safetensors"):
        ktopt.apply(RULES, folder, device="cpu")


def test_more_layers_than_the_config_has_are_refused(llama, tmp_path):
    folder = make_folder(tmp_path / "hf", llama)
    edit_json(folder / "config.json", lambda c: c.update(num_hidden_layers=2))
    with pytest.raises(KtoptError, match=r"model\.layers\.\*\.mlp\.gate_proj\.weight|model\.layers\.2\.mlp"):
        ktopt.load_model(folder, device="cpu")


def test_what_checkpoints_are_known_to_hold_beside_parameters_is_no_fault(tmp_path):
    model = make_model("deepseek_v3")
    folder = make_folder(tmp_path / "hf", model)
    edit_json(folder / "config.json", lambda c: c.update(num_nextn_predict_layers=1))
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(2, 2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    edit(folder, lambda t: t.update(extra))
    made = ktopt.apply(RULES, folder, device="cpu")
    assert torch.allclose(made(PROMPT).logits, model(PROMPT).logits, atol=1e-4)
    edit(folder, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.zeros(2, 2)}))
    with pytest.raises(KtoptError, match=r"model\.layers\.4\.eh_proj\.weight"):
        ktopt.apply(RULES, folder, device="cpu")


def test_what_a_models_class_ignores_is_no_fault(tmp_path):
    class Held:
        path = tmp_path

        def unused(self, names):
            return {"h.0.attn.bias": tmp_path, "other": tmp_path}

    with pytest.raises(KtoptError) as error:
        check_unused(Held(), (), ["attn.bias"])
    assert "other" in str(error.value)
    assert "attn.bias" not in str(error.value)


def test_every_tensor_of_a_written_gguf_is_used(tmp_path):
    for kind in ("llama", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3_text"):
        model = tiny_model(kind)
        source = open_weights(make_gguf(tmp_path / f"{kind}.gguf", model))
        names = [*dict(model.named_parameters(remove_duplicate=False)), *(n for n, _ in model.named_buffers() if "bias" in n)]
        assert source.unused(names) == {}
        assert source.contradictions(model.config.to_dict()) == []
        assert len(source.unused(names[:-1])) > 0 or kind == "gemma3_text"  # whose head is its embedding
        source.close()


@pytest.mark.parametrize(
    ("key", "value", "models"),
    [
        ("attention.head_count", 8, "4"),
        ("rope.freq_base", 5.0, "100000.0"),
        ("block_count", 2, "3"),
        ("block_count", 4, "3"),
        ("block_count", 2**32 - 1, "3"),
        ("embedding_length", 65, "64"),
        ("embedding_length", 0, "64"),
        ("feed_forward_length", 999, "96"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "1e-06"),
        ("attention.layer_norm_rms_epsilon", 1e-3, "1e-06"),
    ],
)
def test_metadata_that_contradicts_the_model_given_is_refused(llama, tmp_path, key, value, models):
    file = make_gguf(tmp_path / "m.gguf", llama, changes={f"llama.{key}": value})
    (tmp_path / "config.json").write_text(json.dumps(llama.config.to_dict()))
    plan = ktopt.compile(RULES, tmp_path / "config.json", device="cpu")
    for given, model in ((plan, None), (RULES, tmp_path / "config.json")):
        with pytest.raises(KtoptError) as error:
            ktopt.apply(given, model, file, **({} if model is None else {"device": "cpu"}))
        text = str(error.value)
        assert f"llama.{key} is {value}" in text
        assert models in text
        assert str(file) in text


@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_an_epsilon_or_a_base_that_is_no_positive_number_is_refused_when_a_gguf_is_read(llama, tmp_path, key, value):
    file = make_gguf(tmp_path / "m.gguf", llama, changes={f"llama.{key}": value})
    with pytest.raises(KtoptError, match=f"llama.{key} is "):
        load_tree(file)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -5}}, "rope_parameters.rope_theta"),
        ({"initializer_range": float("inf")}, "initializer_range"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused_in_a_config(llama, tmp_path, change, named):
    (tmp_path / "config.json").write_text(json.dumps({**llama.config.to_dict(), **change}))
    with pytest.raises(KtoptError, match=rf"config\.json: {named} is "):
        load_tree(tmp_path)


def test_a_config_beside_the_weights_that_contradicts_the_plans_model_is_refused(llama, tmp_path):
    folder = make_folder(tmp_path / "hf", llama)
    plan = ktopt.compile(RULES, folder, device="cpu")
    edit_json(folder / "config.json", lambda c: c.update(rms_norm_eps=0.25))
    with pytest.raises(KtoptError, match=r"rms_norm_eps is 0\.25, and the model's 1e-06"):
        ktopt.apply(plan, weights=folder)


def test_both_spellings_of_a_rotary_base_mean_the_same(llama):
    config = llama.config.to_dict()
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert config_contradictions({**old, "rope_theta": 100000.0, "rope_scaling": None}, config) == []
    found = config_contradictions({**old, "rope_theta": 5.0}, config)
    assert [(each.key, each.file, each.model) for each in found] == [("rope_theta", 5.0, 100000.0)]


@pytest.mark.parametrize("change", [{"rms_norm_eps": 0.5}, {"num_hidden_layers": 2}, {"intermediate_size": 128}])
def test_a_plan_is_refused_for_a_folder_of_another_model(llama, tmp_path, change):
    folder = make_folder(tmp_path / "hf", llama)
    plan = ktopt.compile(RULES, folder, device="cpu")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**llama.config.to_dict(), **change}))
    (tmp_path / "plan.json").write_text(dump_plan(plan))
    for given in (plan, tmp_path / "plan.json"):
        with pytest.raises(KtoptError, match=next(iter(change))):
            ktopt.apply(given, tmp_path / "other", folder)
        assert ktopt.apply(given, folder) is not None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_stored_numbers_that_mean_nothing_by_themselves_are_refused(llama, tmp_path, dtype):
    folder = make_folder(tmp_path / "hf", llama)
    name = "model.layers.1.mlp.up_proj.weight"
    edit(folder, lambda t: t.update({name: t[name].to(dtype)}))
    kind = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.uint8: "U8"}[dtype]
    with pytest.raises(KtoptError, match=f"{name}.*{kind}"):
        ktopt.apply(RULES, folder, device="cpu")


def test_a_folder_with_files_of_the_users_is_not_replaced(llama, tmp_path):
    file = make_gguf(tmp_path / "m.gguf", llama)
    plan = ktopt.compile(RULES, llama, device="cpu")
    out = save_folder(plan, tmp_path / "out", file)
    save_folder(plan, out, file)
    (out / "NOTES").write_text("mine")
    with pytest.raises(UsageError, match="NOTES"):
        save_folder(plan, out, file)
    assert (out / "NOTES").read_text() == "mine"


def test_a_copied_tied_head_is_stored_once_and_stays_tied(tmp_path):
    model = make_model("tied")
    file = make_gguf(tmp_path / "m.gguf", model)
    out = save_folder(ktopt.compile(RULES, model, device="cpu"), tmp_path / "out", file, copy_weights=True)
    assert "lm_head.weight:0" not in load_file(out / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(PROMPT).logits, model(PROMPT).logits)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("dtype",), 5, "dtype"),
        (("dtype",), "int4", "dtype"),
        (("plan",), ["plan.json"], "plan"),
        (("weights",), 7, "weights"),
        (("weights",), {"path": "x"}, "weights"),
        (("weights", 0), "m.gguf", r"weights\[0\]"),
        (("weights", 0, "path"), 3, r"weights\[0\]\.path"),
        (("weights", 0, "size"), "many", r"weights\[0\]\.size"),
        (("weights", 0, "fingerprint"), None, r"weights\[0\]\.fingerprint"),
        (("weights", 0, "copied"), "yes", r"weights\[0\]\.copied"),
        (("strange",), 1, "strange"),
    ],
)
def test_a_damaged_quantization_config_is_refused_by_field(llama, tmp_path, path, value, named):
    file = make_gguf(tmp_path / "m.gguf", llama)
    out = save_folder(ktopt.compile(RULES, llama, device="cpu"), tmp_path / "out", file)

    def change(config):
        target = config["quantization_config"]
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    edit_json(out / "config.json", change)
    with pytest.raises(KtoptError, match=named):
        AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(KtoptError, match=named):
        ktopt.load_model(out)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: p["steps"].pop(5), "in the model, not in the plan"),
        (lambda p: p["steps"].clear(), "in the model, not in the plan"),
        (lambda p: p["model"]["config"].update(rms_norm_eps=0.5), "rms_norm_eps|config_digest"),
        (lambda p: p["model"]["config"].update(hidden_act="gelu"), "hidden_act|act_fn|config_digest"),
        (lambda p: p["model"]["config"].update(unknown=1), "config_digest"),
        (lambda p: p["model"]["config"].update(rms_norm_eps=float("nan")), "rms_norm_eps: nan"),
        (lambda p: p["model"]["config"]["rope_parameters"].update(rope_theta=float("inf")), "rope_theta: inf"),
        (lambda p: p["model"].pop("config_digest"), "'config_digest' is missing"),
    ],
)
def test_a_damaged_plan_in_a_folder_is_refused(llama, tmp_path, change, named):
    file = make_gguf(tmp_path / "m.gguf", llama)
    out = save_folder(ktopt.compile(RULES, llama, device="cpu"), tmp_path / "out", file)
    edit_json(out / "plan.json", change)
    with pytest.raises(KtoptError, match=named):
        AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(KtoptError, match=named):
        ktopt.load_model(out)
