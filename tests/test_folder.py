"""Optimized folders: written whole or not at all, loaded by transformers, and refused when their weights are no longer theirs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time

import pytest
import torch
from apply_fixtures import PROMPT, greedy, make_model, make_tokenizer
from gguf_fixtures import make_folder, make_gguf
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import ktopt
from ktopt.diagnostics import KtoptError
from ktopt.folder import fingerprint, save_folder, verify_folder
from ktopt.operators.modules.linear import KTransformersLinear
from ktopt.plan_json import dump_plan
from ktopt.source import SourceFile
from ktopt.weights.open import open_weights
from ktopt.weights.packed import PackedWeights, joint_axis

RULES = SourceFile(
    "rules.yaml",
    """
- match: {name: layers, class: torch.nn.Linear}
  replace: {class: KTransformersLinear, kwargs: {generate_op: KLinearTorch, prefill_op: KLinearTorch}}
- match: {name: .*}
  replace: {class: default}
""",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A Mixtral in a Q8_0 GGUF, its plan, and the model rounded to what the file holds."""
    place = tmp_path_factory.mktemp("made")
    model = make_model("mixtral")
    file = make_gguf(place / "tiny.gguf", model, "Q8_0")
    return model, ktopt.compile(RULES, model, device="cpu"), file


def files_of(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("copy_weights", [False, True])
def test_from_pretrained_loads_a_folder_and_computes_the_original(made, tmp_path, copy_weights):
    model, plan, file = made
    out = save_folder(plan, tmp_path / "out", file, copy_weights=copy_weights)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert isinstance(loaded.model.layers[0].self_attn.q_proj, KTransformersLinear)
    assert dump_plan(loaded.ktopt_plan) == dump_plan(plan)
    assert torch.equal(loaded(PROMPT).logits, model(PROMPT).logits)
    assert greedy(loaded) == greedy(model)
    assert not loaded.training


@pytest.mark.parametrize("kind", ["tied", "deepseek_v3", "gemma3_text"])
def test_a_folder_of_any_model_loads_as_the_original(kind, tmp_path):
    model = make_model(kind)
    weights = make_folder(tmp_path / "hf", model)
    out = save_folder(ktopt.compile(RULES, model, device="cpu"), tmp_path / "out", weights)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded(PROMPT).logits, model(PROMPT).logits)
    assert all(torch.equal(buffer, dict(model.named_buffers())[name]) for name, buffer in loaded.named_buffers())


def test_transformers_loads_without_initialising_anything(made, tmp_path, monkeypatch):
    from transformers import MixtralPreTrainedModel

    _, plan, file = made
    out = save_folder(plan, tmp_path / "out", file)
    initialised = []
    original = MixtralPreTrainedModel._init_weights
    monkeypatch.setattr(
        MixtralPreTrainedModel,
        "_init_weights",
        lambda self, module: (initialised.append(type(module).__name__), original(self, module)),
    )
    AutoModelForCausalLM.from_pretrained(out)
    assert set(initialised) == {"MixtralRotaryEmbedding"}


def test_load_model_gives_model_and_tokenizer(made, tmp_path):
    model, plan, file = made
    out = save_folder(plan, tmp_path / "out", file)
    loaded, tokenizer = ktopt.load_model(out)
    assert torch.equal(loaded(PROMPT).logits, model(PROMPT).logits)
    assert tokenizer.decode(tokenizer("the end")["input_ids"]) == "the end"
    assert tokenizer.vocab_size == 320


def test_a_folder_refers_to_its_weights_by_relative_path_and_can_move_with_them(made, tmp_path):
    model, plan, file = made
    shutil.copy(file, tmp_path / "tiny.gguf")
    save_folder(plan, tmp_path / "deep" / "out", tmp_path / "tiny.gguf")
    refs = json.loads((tmp_path / "deep/out/config.json").read_text())["quantization_config"]["weights"]
    known = {"fingerprint": fingerprint(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert refs == [{"path": "../../tiny.gguf", "size": file.stat().st_size, **known, "copied": False}]
    assert known["fingerprint"].startswith("sampled-sha256:")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "deep").rename(moved / "deep")
    (tmp_path / "tiny.gguf").rename(moved / "tiny.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(moved / "deep" / "out")
    assert torch.equal(loaded(PROMPT).logits, model(PROMPT).logits)


def test_without_copy_the_safetensors_file_is_empty_and_with_copy_it_keeps_the_stored_bytes(made, tmp_path):
    _, plan, file = made
    for copy_weights in (False, True):
        out = save_folder(plan, tmp_path / "out", file, copy_weights=copy_weights)
        with safe_open(out / "model.safetensors", "pt") as stored:
            count = len(list(stored.keys()))
        assert (count > 0) == copy_weights
    assert (out / "model.safetensors").stat().st_size < 1.1 * file.stat().st_size


def test_a_copied_folder_needs_no_other_file(made, tmp_path):
    model, plan, file = made
    shutil.copy(file, tmp_path / "tiny.gguf")
    out = save_folder(plan, tmp_path / "out", tmp_path / "tiny.gguf", copy_weights=True)
    (tmp_path / "tiny.gguf").unlink()
    loaded, tokenizer = ktopt.load_model(out)
    assert torch.equal(loaded(PROMPT).logits, model(PROMPT).logits)
    assert len(tokenizer) == 320


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gemma3_text", "llama"])
def test_packed_weights_read_as_the_source_does(kind, tmp_path):
    model = make_model(kind)
    file = make_gguf(tmp_path / "m.gguf", model, "Q4_0")
    plan = ktopt.compile(RULES, model, device="cpu")
    out = save_folder(plan, tmp_path / "out", file, copy_weights=True)
    packed, source = PackedWeights(out / "model.safetensors"), open_weights(file, plan.model.config)
    assert set(packed.names()) <= set(model.state_dict())
    for name in packed.names():
        assert packed.stored(name).shape == tuple(source.stored(name).shape)
        assert torch.equal(packed.read(name, torch.float32), source.read(name, torch.float32)), name


def test_a_folder_written_from_sharded_safetensors_loads(tmp_path):
    model = make_model("qwen3_moe")
    weights = make_folder(tmp_path / "hf", model, max_shard_size="100KB")
    make_tokenizer().save_pretrained(weights)
    assert len(list(weights.glob("*.safetensors"))) > 1
    out = save_folder(ktopt.compile(RULES, model, device="cpu"), tmp_path / "out", weights)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(PROMPT).logits, model(PROMPT).logits)
    assert AutoTokenizer.from_pretrained(out)("the")["input_ids"] == make_tokenizer()("the")["input_ids"]


def test_the_generation_config_beside_the_weights_is_kept(tmp_path):
    model = make_model()
    model.generation_config.update(temperature=0.25, do_sample=True)
    weights = make_folder(tmp_path / "hf", model)
    plan = ktopt.compile(RULES, model, device="cpu")
    out = save_folder(plan, tmp_path / "out", weights)
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.temperature == 0.25
    assert ktopt.apply(plan, weights=weights).generation_config.temperature == 0.25


def test_a_plan_in_bfloat16_loads_in_bfloat16_whatever_dtype_is_asked(made, tmp_path):
    model, _, file = made
    plan = ktopt.compile(RULES, model, device="cpu", dtype="bfloat16")
    out = save_folder(plan, tmp_path / "out", file)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


# --- what is refused --------------------------------------------------------------------------------------------------------------


def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(made, tmp_path):
    _, plan, file = made
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KtoptError, match="not a folder that ktopt wrote"):
        save_folder(plan, tmp_path, file)
    assert files_of(tmp_path) == {"notes.txt"}


def test_an_earlier_folder_is_replaced_whole(made, tmp_path):
    _, plan, file = made
    out = save_folder(plan, tmp_path / "out", file)
    (out / "vocab.txt").write_text("old")
    save_folder(plan, out, file)
    assert (out / "chat_template.jinja").read_text() != "old"
    assert files_of(tmp_path) == {"out"}


def test_a_failure_while_writing_leaves_nothing(made, tmp_path, monkeypatch):
    _, plan, file = made

    def fail(plan):
        raise OSError("no space left")

    monkeypatch.setattr("ktopt.folder.dump_plan", fail)
    with pytest.raises(OSError, match="no space left"):
        save_folder(plan, tmp_path / "out", file)
    assert files_of(tmp_path) == set()


def test_weights_of_another_model_are_refused_before_anything_is_written(made, tmp_path):
    _, plan, _ = made
    other = make_gguf(tmp_path / "other.gguf", make_model("qwen3_moe"))
    with pytest.raises(KtoptError, match=r"other\.gguf"):
        save_folder(plan, tmp_path / "out", other)
    assert files_of(tmp_path) == {"other.gguf"}


def test_a_folder_whose_weights_are_gone_is_refused_naming_them(made, tmp_path):
    _, plan, file = made
    shutil.copy(file, tmp_path / "tiny.gguf")
    out = save_folder(plan, tmp_path / "out", tmp_path / "tiny.gguf")
    (tmp_path / "tiny.gguf").unlink()
    with pytest.raises(KtoptError, match=r"tiny.gguf doesn't exist"):
        AutoModelForCausalLM.from_pretrained(out)


def test_a_folder_whose_weights_were_changed_is_refused(made, tmp_path):
    _, plan, file = made
    shutil.copy(file, tmp_path / "tiny.gguf")
    out = save_folder(plan, tmp_path / "out", tmp_path / "tiny.gguf")
    with (tmp_path / "tiny.gguf").open("r+b") as stream:
        stream.seek(-5, os.SEEK_END)
        stream.write(b"other")
    with pytest.raises(KtoptError, match="not the file that the folder was made for"):
        ktopt.load_model(out)


def test_a_byte_between_the_samples_is_found_by_doctor_and_not_at_load(made, tmp_path, capsys):
    from ktopt.cli import main

    _, plan, file = made
    large = tmp_path / "tiny.gguf"
    shutil.copy(file, large)
    with large.open("ab") as stream:
        stream.truncate(64 << 20)
    out = save_folder(plan, tmp_path / "out", large)
    assert main(["doctor", str(out)]) == 0
    assert capsys.readouterr().out == "ok  plan.json\nok  ../tiny.gguf\n"
    with large.open("r+b") as stream:
        stream.seek((4 << 20) + (100 << 10))
        stream.write(b"x")
    ktopt.load_model(out)
    assert main(["doctor", str(out)]) == 1
    assert "tiny.gguf has other bytes" in capsys.readouterr().err


def test_doctor_checks_the_plan_of_a_folder_too(made, tmp_path):
    _, plan, file = made
    out = save_folder(plan, tmp_path / "out", file)
    data = json.loads((out / "plan.json").read_text())
    del data["steps"][5]
    (out / "plan.json").write_text(json.dumps(data))
    with pytest.raises(KtoptError, match="in the model, not in the plan"):
        list(verify_folder(out))


def test_a_fingerprint_of_another_kind_is_refused(made, tmp_path):
    _, plan, file = made
    out = save_folder(plan, tmp_path / "out", file)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["weights"][0]["fingerprint"] = "crc32:1234"
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(KtoptError, match="of a kind that this ktopt doesn't know"):
        ktopt.load_model(out)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_generate_stops_at_the_tokenizers_end_token_where_the_models_config_has_another(kind, tmp_path):
    """As SmolLM2-135M-Instruct: its config ends at one token and its chats at another."""
    model = make_model()
    tokenizer = make_tokenizer()
    ends = [2, tokenizer.eos_token_id]
    model.generation_config.eos_token_id = 2
    if kind == "folder":
        weights = make_folder(tmp_path / "hf", model)
        tokenizer.save_pretrained(weights)
        tokenizer = None
    else:
        weights = make_gguf(tmp_path / "m.gguf", model)
    out = save_folder(ktopt.compile(RULES, model, device="cpu"), tmp_path / "out", weights, tokenizer=tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    own = loaded.generation_config.eos_token_id
    assert own == ends if kind == "folder" else ends[1] in (own, *([] if isinstance(own, int) else own))
    assert ends[1] in ktopt.load_model(out)[0].generation_config.eos_token_id
    first = greedy(loaded, 1)[0]
    head = loaded.get_output_embeddings().weight
    with torch.no_grad():
        head[ends[1]] = head[first] * 2  # now the likeliest token is the tokenizer's end
    assert greedy(loaded, 8) == ends[1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "../plan.json"}, "must lie in the folder itself"),
        ({"plan": "gone.json"}, "gone.json"),
        ({"weights": []}, "names no weights"),
        ({"weights": [{"size": 3}]}, "weights.0..path must be a text"),
    ],
)
def test_a_folder_with_a_wrong_config_is_refused(made, tmp_path, change, message):
    _, plan, file = made
    out = save_folder(plan, tmp_path / "out", file)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"].update(change)
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(KtoptError, match=message):
        AutoModelForCausalLM.from_pretrained(out)


def test_a_packed_file_that_is_none_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(KtoptError, match="not weights that"):
        PackedWeights(tmp_path / "model.safetensors")


SIZE = 64 << 20
SAMPLED = [0, 3 << 20, 4 << 20, (4 << 20) + (SIZE - (4 << 20) - (64 << 10)) * 31 // 63, SIZE - 1]


@pytest.mark.parametrize("place", SAMPLED)
def test_a_fingerprint_tells_a_file_changed_in_a_sampled_place(tmp_path, place):
    for name in ("one", "other"):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(SIZE)
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "other")
    with (tmp_path / "other").open("r+b") as stream:
        stream.seek(place)
        stream.write(b"x")
    assert fingerprint(tmp_path / "one") != fingerprint(tmp_path / "other")


def test_a_fingerprint_of_a_large_file_is_quick(tmp_path):
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(1 << 40)
    start = time.process_time()
    fingerprint(tmp_path / "large")
    assert time.process_time() - start < 1


def test_parts_join_along_the_axis_that_their_shapes_add_up_on():
    assert joint_axis((4, 6, 3), [(4, 2, 3), (4, 4, 3)]) == 1
    assert joint_axis((6, 3), [(2, 3), (4, 3)]) == 0
    assert joint_axis((6, 3), [(18,)]) == 0
    assert joint_axis((6, 3), [(2, 3), (3, 3)]) is None
    assert joint_axis((6, 3), []) is None


def test_copying_says_how_far_it_is(made, tmp_path):
    _, plan, file = made
    events = []
    out = save_folder(plan, tmp_path / "out", file, copy_weights=True, progress=events.append)
    with safe_open(out / "model.safetensors", "pt") as stored:
        names = {key.rpartition(":")[0] for key in stored.keys()}  # noqa: SIM118
    assert {event.tensor for event in events} == names
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert {event.total_bytes for event in events} == {done[-1]}
