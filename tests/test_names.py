"""Parameters read back from GGUF files equal those of the model they were written from, and configs too."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_fixtures import KINDS, make_gguf, tiny_config, tiny_model

from ktopt.weights import MissingTensor, WeightError
from ktopt.weights.dequantize import dequantize
from ktopt.weights.gguf import open_gguf
from ktopt.weights.gguf_config import config_from_gguf
from ktopt.weights.gguf_source import GGUFSource
from ktopt.weights.open import ModuleTensors, check_complete, open_weights
from ktopt.weights.recipes import Part, Recipe, alternated
from ktopt.weights.rope_config import _llama3_factors

MOE_TOOL = Path(__file__).parents[2] / "shared" / "tools" / "make_moe_gguf.py"
SPELLINGS: dict[str, dict[str, Any]] = {
    "as converters write now": {},
    "in Q8_0": {"quant": "Q8_0"},
    "as older converters wrote": {"quant": "Q4_0", "kv_b": "fused", "experts": "each", "qkvz": "fused"},
    "with gate and up in one": {"quant": "BF16", "experts": "gate_up"},
}


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


def holds(source: Any, model: torch.nn.Module) -> None:
    """The source has the model's parameters and no others, and their values."""
    assert check_complete(source, shapes(model)) == []
    assert set(source.names()) == set(model.state_dict())
    for name, expected in model.state_dict().items():
        assert torch.equal(source.read(name, torch.float32), expected), name


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_written_model_reads_back_exactly(kind: str, spelling: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    source = GGUFSource(make_gguf(tmp_path / "m.gguf", model, **SPELLINGS[spelling]), model.config.to_dict())
    holds(source, model)


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_is_the_models(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    config = config_from_gguf(make_gguf(tmp_path / "m.gguf", model))
    found = transformers.AutoConfig.for_model(**config).to_dict()
    expected = transformers.AutoConfig.for_model(**model.config.to_dict()).to_dict()
    for key in ("dtype", "architectures", "transformers_version", "_name_or_path"):
        found.pop(key, None), expected.pop(key, None)
    if "head_dim" not in expected:
        assert found.pop("head_dim", None) == model.model.layers[0].self_attn.head_dim
    assert found == expected
    assert config["architectures"] == [type(model).__name__]


THEIR_SIZES: dict[str, dict[str, Any]] = {  # sizes that transformers' loader takes from its defaults, not from the file
    "llama": {}, "qwen2": {}, "gemma3_text": {}, "qwen3": {"head_dim": 128},
    "qwen2_moe": {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
}  # fmt: skip


@pytest.mark.parametrize("kind", THEIR_SIZES)
def test_transformers_reads_the_same_weights_from_the_fixtures(kind: str, tmp_path: Path) -> None:
    """The fixtures' own naming and permutations are right: transformers' loader, which is not ours, agrees."""
    model = tiny_model(kind, **THEIR_SIZES[kind])
    make_gguf(tmp_path / "m.gguf", model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    theirs = loaded.state_dict()
    for name, expected in model.state_dict().items():
        assert torch.equal(theirs[name], expected), name


@pytest.mark.parametrize("preset", ["qwen3moe-tiny", "deepseek2-tiny"])
def test_reads_what_another_writer_of_moe_models_wrote(preset: str, tmp_path: Path) -> None:
    """A script that is not ours writes one model as GGUF and as a Hugging Face folder, which transformers loads."""
    if not MOE_TOOL.is_file():
        pytest.skip(f"{MOE_TOOL} is absent")
    folder = tmp_path / "hf"
    command = [sys.executable, str(MOE_TOOL), str(tmp_path / "m.gguf"), "--preset", preset, "--q", "Q8_0", "--vocab", "320"]
    subprocess.run([*command, "--hf-out", str(folder)], check=True, capture_output=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    source = GGUFSource(tmp_path / "m.gguf")
    assert check_complete(source, shapes(model)) == []
    for name, expected in model.state_dict().items():
        assert torch.equal(source.read(name, torch.float32), expected), name
    written = json.loads((folder / "config.json").read_text())
    found = transformers.AutoConfig.for_model(**source.config())
    reference = transformers.AutoConfig.from_pretrained(folder)
    for key in (k for k in written if hasattr(reference, k) and k not in ("torch_dtype", "rope_theta")):
        assert getattr(found, key) == getattr(reference, key), key
    assert found.rope_parameters["rope_theta"] == reference.rope_parameters["rope_theta"]
    holds(open_weights(folder), model)


def test_the_demo_model_has_smollm2s_config_and_shapes(smollm2: Path) -> None:
    source = open_weights(smollm2)
    facts = Path(__file__).parents[2] / "shared" / "facts" / "model_configs.json"
    if facts.is_file():
        published = json.loads(facts.read_text())["smollm2-135m"]["config"]
        config = dict(source.config() or {})
        same = config.keys() & published.keys() - {"bos_token_id", "eos_token_id"}  # the instruction-tuned model ends otherwise
        assert {k: config[k] for k in same} == {k: published[k] for k in same}
        assert config["rope_parameters"]["rope_theta"] == published["rope_theta"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**source.config()))
    assert check_complete(source, shapes(model)) == []
    assert set(source.names()) == set(model.state_dict())
    source.close()


def test_raw_rows_are_quantised_blocks_in_the_models_order(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    source = GGUFSource(make_gguf(tmp_path / "m.gguf", model, quant="Q4_0"))
    ((kind, shape, raw),) = source.raw("model.layers.0.self_attn.q_proj.weight")
    assert (kind, shape) == ("Q4_0", (64, 64))
    assert torch.equal(dequantize(raw, kind), model.model.layers[0].self_attn.q_proj.weight)
    gate, up = source.raw("model.layers.1.mlp.experts.gate_up_proj")
    fused = torch.cat([dequantize(raw, kind).view(shape) for kind, shape, raw in (gate, up)], dim=1)
    assert torch.equal(fused, model.model.layers[1].mlp.experts.gate_up_proj)
    assert not gate[2].flags.owndata


def test_raw_refuses_what_is_stored_otherwise(tmp_path: Path) -> None:
    source = GGUFSource(make_gguf(tmp_path / "m.gguf", tiny_model("deepseek_v3")))
    with pytest.raises(WeightError, match=r"kv_b_proj.* can't be handed out as stored"):
        source.raw("model.layers.0.self_attn.kv_b_proj.weight")


def test_how_a_parameter_is_stored_is_known_without_reading(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", tiny_model("qwen3_moe"), quant="Q8_0")
    stored = GGUFSource(path).stored("model.layers.0.mlp.experts.gate_up_proj")
    assert stored.stored == ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight")
    assert (stored.shape, stored.types, stored.file) == ((8, 64, 64), ("Q8_0", "Q8_0"), path)
    assert stored.nbytes == 8 * 64 * 64 // 32 * 34


def test_reading_holds_little_more_than_the_result(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=40_000, num_hidden_layers=1)
    source = GGUFSource(make_gguf(tmp_path / "m.gguf", model, quant="Q8_0", tokenizer=False))
    with torch.profiler.profile(profile_memory=True) as profile:
        source.read("model.embed_tokens.weight", torch.bfloat16)
    most = max(event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage)
    assert most <= 40_000 * 64 * 2 + 4096


# --- what is refused


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    source = GGUFSource(make_gguf(tmp_path / "m.gguf", tiny_model("qwen2")))
    assert source.stored("lm_head.weight").stored == ("token_embd.weight",)
    assert source.config()["tie_word_embeddings"] is True


def test_a_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", tiny_model("qwen2"))
    with pytest.raises(WeightError, match=r"m\.gguf is the wrong file for this model: .*'qwen2'.* not llama"):
        open_weights(path, {"model_type": "llama"})


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    path.write_bytes(path.read_bytes().replace(b"llama", b"lxama"))
    with pytest.raises(WeightError, match="architecture 'lxama' can't be read; known are llama"):
        open_weights(path)


def test_missing_tensors_and_other_shapes_are_all_named_with_their_file(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", tiny_model("llama", num_hidden_layers=1))
    wanted = shapes(tiny_model("llama", num_hidden_layers=2)) | {"model.norm.weight": (65,)}
    problems = check_complete(GGUFSource(path), wanted)
    assert len(problems) == 10
    assert all("m.gguf" in problem for problem in problems)
    assert any("blk.1.attn_q.weight for the parameter model.layers.1.self_attn.q_proj.weight" in p for p in problems)
    assert any("output_norm.weight makes model.norm.weight of shape [64], but the model wants [65]" in p for p in problems)
    with pytest.raises(MissingTensor, match=r"has no blk\.1\.attn_norm\.weight"):
        GGUFSource(path).read("model.layers.1.input_layernorm.weight", torch.float32)


def test_experts_of_different_shapes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 4, 8), np.float32))
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((2, 4, 9), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(WeightError, match=r"m\.gguf: blk\.0\.ffn_up_exps\.weight has the shape \[2, 4, 9\]"):
        GGUFSource(path).stored("model.layers.0.mlp.experts.gate_up_proj")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", None, "the metadata lacks llama.block_count"),
        ("llama.block_count", 2**31, "llama.block_count is 2147483648, and the file has 12 tensors"),
        ("llama.block_count", "two", "llama.block_count is 'two'"),
        ("llama.nextn_predict_layers", 1, "leaves no layer"),
        ("llama.attention.head_count", "many", "llama.attention.head_count is 'many', not a whole number"),
        ("llama.attention.head_count", 0, "llama.attention.head_count is 0; it must be at least 1"),
        ("llama.feed_forward_length", [1, 2], r"llama.feed_forward_length is \[1, 2\], not a whole number"),
        ("llama.context_length", True, "llama.context_length is True, not a whole number"),
        ("llama.rope.freq_base", "x", "llama.rope.freq_base is 'x', not a number"),
        ("llama.rope.scaling.type", "ntk", "llama.rope.scaling.type is 'ntk'"),
        ("llama.embedding_length", 32, r"token_embd.weight is missing or not \[vocabulary, 32\]"),
    ],
)
def test_wrong_metadata_names_its_key(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", tiny_model("llama", num_hidden_layers=1), changes={key: value})
    with pytest.raises(WeightError, match=message):
        config_from_gguf(path)


# --- rotary scaling


def test_yarn_of_deepseek_comes_back(tmp_path: Path) -> None:
    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
    }  # fmt: skip
    model = tiny_model("deepseek_v2", rope_parameters=yarn)
    assert config_from_gguf(make_gguf(tmp_path / "m.gguf", model))["rope_parameters"] == yarn


def test_linear_scaling_comes_back(tmp_path: Path) -> None:
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = make_gguf(tmp_path / "m.gguf", tiny_model("llama", num_hidden_layers=1), changes=changes)
    assert config_from_gguf(path)["rope_parameters"] == {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_frequency_factors_are_transformers(factor: float) -> None:
    """What a converter writes as rope_freqs is the plain inverse frequencies divided by transformers' scaled ones."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = tiny_config("llama", head_dim=128, rope_parameters=rope)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    assert torch.allclose(torch.tensor(_llama3_factors(500000.0, 128, factor)), plain / scaled, rtol=1e-4)


def test_llama_3s_scaling_is_found_from_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    plain = make_gguf(tmp_path / "plain.gguf", tiny_model("llama", num_hidden_layers=1))
    reader, writer = gguf.GGUFReader(plain), gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama.") and "freq_base" not in name:
            writer.add_uint32(name, field.contents()) if field.types[0] != 6 else writer.add_float32(name, field.contents())
    writer.add_float32("llama.rope.freq_base", 500000.0)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    writer.add_tensor("rope_freqs.weight", np.array(_llama3_factors(500000.0, 16, 8.0), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    rope = config_from_gguf(path)["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("llama3", 8.0, 8192)
    data = path.read_bytes()
    first = open_gguf(path).tensors["rope_freqs.weight"].offset
    path.write_bytes(data[:first] + struct.pack("<f", 3.0) + data[first + 4 :])
    with pytest.raises(WeightError, match="rope_freqs"):
        config_from_gguf(path)


# --- a model in hand


def test_a_model_in_hand_reads_like_a_file() -> None:
    model = tiny_model("deepseek_v3")
    tensors = ModuleTensors(model)
    holds(tensors, model)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert tensors.stored(name).types == ("F32",)
    assert tensors.read("model.norm.weight", torch.bfloat16).dtype == torch.bfloat16
    weight = tensors.read("model.norm.weight", torch.float32)
    assert weight.data_ptr() == model.model.norm.weight.data_ptr()


def test_a_model_on_meta_says_that_it_has_no_data() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(WeightError, match=r"LlamaForCausalLM in memory>: model\.norm\.weight has no data"):
        ModuleTensors(model).read("model.norm.weight", torch.float32)


def test_a_projection_whose_parts_take_turns_is_handed_out_in_the_order_of_its_rows(tmp_path):
    model = tiny_model("qwen3_next")
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    source = open_weights(make_gguf(tmp_path / "m.gguf", model, "Q8_0"))
    wanted = dict(model.named_parameters())[name]
    ((kind, shape, raw),) = source.raw(name)
    assert shape == tuple(wanted.shape)
    assert torch.equal(dequantize(raw, kind).view(shape), wanted)
    source.close()


def test_parts_of_different_types_take_turns_in_pieces():
    recipe = Recipe((6, 2), (2, 3, 2), (Part("a", (slice(None), slice(0, 2))), Part("b", (slice(None), slice(2, None)))))
    first, second = np.arange(8, dtype=np.float32).reshape(4, 2), 100 + np.arange(4, dtype=np.float32).reshape(2, 2)
    made = alternated(recipe, [("F32", (4, 2), first), ("F16", (2, 2), second)])
    assert [(kind, shape) for kind, shape, _ in made] == [("F32", (2, 2)), ("F16", (1, 2))] * 2
    assert np.concatenate([raw for _, _, raw in made])[:, 0].tolist() == [0, 2, 100, 4, 6, 102]
    assert recipe.alternates
