"""Safetensors folders as transformers and older tools write them, and headers that lie."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers
from gguf_fixtures import KINDS, make_folder, make_gguf, tiny_model
from safetensors.torch import save_file

from ktopt.weights import MissingTensor, WeightError
from ktopt.weights.open import check_complete, open_weights
from ktopt.weights.safetensors import INDEX, SafetensorsFile
from ktopt.weights.safetensors_source import SafetensorsSource


def holds(source: Any, model: torch.nn.Module) -> None:
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert check_complete(source, shapes) == []
    assert set(source.names()) == set(shapes)
    for name, expected in model.state_dict().items():
        assert torch.equal(source.read(name, torch.float32), expected), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_checkpoints_separate_experts_become_the_models(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    source = open_weights(make_folder(tmp_path, model, experts="each"))
    assert any(".experts.1." in name for name in source._holder) == hasattr(model.model.layers[-1].mlp, "experts")
    holds(source, model)
    assert (source.config() or {})["model_type"] == kind


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3"])
def test_todays_fused_experts_are_read_from_shards(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    source = open_weights(make_folder(tmp_path, model, experts="fused", max_shard_size="100KB"))
    assert len(source.files) > 2
    holds(source, model)
    source.close()


def test_the_reader_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    tensors = {
        "f32": torch.randn(3, 5), "f16": torch.randn(4).half(), "bf16": torch.randn(2, 2, 2).bfloat16(),
        "scalar": torch.tensor(2.5),
        "i64": torch.arange(6), "u8": torch.arange(6, dtype=torch.uint8), "flag": torch.tensor([True, False]),
        "f8": torch.randn(8, 8).to(torch.float8_e4m3fn), "nothing": torch.empty(0, 4),
    }  # fmt: skip
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    source = SafetensorsSource(path)
    with safetensors.safe_open(path, "pt") as theirs:
        assert set(theirs.keys()) == set(source.names()) == set(tensors)
        for name in tensors:
            expected = theirs.get_tensor(name)
            assert torch.equal(source.read(name, torch.float32), expected.float()), name
            assert source.stored(name).shape == tuple(expected.shape)


def test_raw_gives_the_mapped_bytes(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    source = open_weights(make_folder(tmp_path, model))
    parts = source.raw("model.layers.0.mlp.experts.gate_up_proj")
    assert [(kind, shape) for kind, shape, _ in parts] == [("F32", (96, 64))] * 8
    gate = torch.frombuffer(bytearray(parts[0][2].tobytes()), dtype=torch.float32).view(96, 64)
    assert torch.equal(gate, model.model.layers[0].mlp.experts.gate_up_proj[0, :96])


def test_a_head_that_is_neither_stored_nor_tied_is_missing(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    assert "lm_head.weight" in open_weights(tmp_path, {"tie_word_embeddings": True})
    with pytest.raises(MissingTensor, match=r"has no tensor for the parameter lm_head\.weight"):
        open_weights(tmp_path, {"tie_word_embeddings": False}).stored("lm_head.weight")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.input_layernorm.weight": torch.ones(2) for i in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    names = open_weights(tmp_path, {"num_hidden_layers": 2, "tie_word_embeddings": False}).names()
    assert list(names) == ["model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_prefixes_of_multimodal_and_base_checkpoints_are_seen_through(prefix: str, tmp_path: Path) -> None:
    save_file({prefix + "layers.0.input_layernorm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    source = open_weights(tmp_path)
    assert list(source.names()) == ["model.layers.0.input_layernorm.weight"]
    assert torch.equal(source.read("model.layers.0.input_layernorm.weight", torch.float32), torch.ones(2))


@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_fp8_matrices_are_multiplied_by_their_block_scales(block: tuple[int, int], tmp_path: Path) -> None:
    rows, columns = 200, 144
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({name: weight, name + "_scale_inv": scale}, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": list(block)}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization, "tie_word_embeddings": False}))
    source = open_weights(tmp_path)
    expected = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            expected[i, j] = weight[i, j].float() * scale[i // block[0], j // block[1]]
    assert list(source.names()) == [name]
    assert torch.equal(source.read(name, torch.float32), expected)
    with pytest.raises(WeightError, match="has scales beside it"):
        source.raw(name)


def test_scales_of_another_size_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = {name: torch.zeros(256, 256).to(torch.float8_e4m3fn), name + "_scale_inv": torch.ones(1, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"down_proj\.weight: its scales are \[1, 2\]"):
        open_weights(tmp_path).read(name, torch.float32)


# --- what is refused


def written(path: Path, header: Any, payload: int = 64) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(payload))
    return path


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HOSTILE: dict[str, tuple[Any, str]] = {
    "not JSON": (b"{", "no proper JSON"),
    "a list": ([], "no JSON object"),
    "deeply nested": (b"[" * 200_000, "no proper JSON"),
    "a name twice": (b'{"t": 1, "t": 2}', "names 't' twice"),
    "no dictionary": ({"t": 3}, "tensor t has the unknown dtype None"),
    "an unknown dtype": (entry(dtype="Q4"), "tensor t has the unknown dtype 'Q4'"),
    "a dtype that is a list": (entry(dtype=["F32"]), "tensor t has the unknown dtype"),
    "a negative size": (entry(shape=[-4]), "tensor t has no proper shape"),
    "a huge size": (entry(shape=[2**70]), "tensor t has no proper shape"),
    "an overflowing shape": (entry(shape=[2**40, 2**40]), "tensor t of shape"),
    "a size that is true": (entry(shape=[True]), "tensor t has no proper shape"),
    "no offsets": (entry(offsets=None), "tensor t has no proper shape and data_offsets"),
    "offsets backwards": (entry(offsets=[16, 0]), "needs 16 bytes"),
    "offsets for another shape": (entry(offsets=[0, 12]), "needs 16 bytes"),
    "past the end": (entry(offsets=[64, 80]), "tensor t ends at byte"),
    "overlapping": ({**entry(), "u": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, "tensors t and u overlap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_lying_header_is_named(case: str, tmp_path: Path) -> None:
    header, message = HOSTILE[case]
    start = time.process_time()
    with pytest.raises(WeightError, match=r"bad\.safetensors") as caught:
        SafetensorsFile(written(tmp_path / "bad.safetensors", header))
    assert message in str(caught.value)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(("data", "message"), [(b"", "has 0 bytes"), (b"\xff" * 64, "claims 18446744073709551615 bytes")])
def test_no_safetensors_at_all_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightError, match=message):
        SafetensorsFile(path)


def test_a_truncated_shard_names_tensor_and_file(tmp_path: Path) -> None:
    make_folder(tmp_path, tiny_model("llama"), max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(WeightError, match=rf"{shard.name}: tensor \S+ ends at byte .* truncated"):
        open_weights(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path, tiny_model("llama"), max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightError, match=rf"{shard.name} is missing"):
        open_weights(tmp_path)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_an_index_can_not_lead_out_of_its_folder(place: Any, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"t": place}}))
    with pytest.raises(WeightError, match="tensor t is said to be in"):
        open_weights(tmp_path)


def test_an_index_that_names_a_tensor_too_many_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, tiny_model("llama"), max_shard_size="100KB")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.extra"] = next(iter(index["weight_map"].values()))
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"lacks the tensor model\.extra"):
        open_weights(tmp_path)


def test_experts_of_different_shapes_are_named(tmp_path: Path) -> None:
    tensors = {f"model.layers.0.mlp.experts.{e}.down_proj.weight": torch.zeros(4, 4 + e) for e in range(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"experts\.1\.down_proj\.weight has the shape \[4, 5\]"):
        open_weights(tmp_path).stored("model.layers.0.mlp.experts.down_proj")


# --- finding the weights


def test_the_kind_of_weights_is_found_out(tmp_path: Path) -> None:
    model = tiny_model("llama")
    make_folder(tmp_path / "hf", model)
    make_folder(tmp_path / "shards", model, max_shard_size="100KB")
    (tmp_path / "gguf").mkdir()
    gguf = make_gguf(tmp_path / "gguf" / "m.gguf", model)
    for path in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors", tmp_path / "shards" / INDEX, gguf, gguf.parent):
        holds(open_weights(path), model)


def test_several_gguf_models_in_a_folder_must_be_told_apart(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        make_gguf(tmp_path / name, tiny_model("llama", num_hidden_layers=1))
    with pytest.raises(WeightError, match=r"several GGUF models \(a\.gguf, b\.gguf\)"):
        open_weights(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="has neither GGUF nor safetensors"):
        open_weights(tmp_path)
    with pytest.raises(WeightError, match="does not exist"):
        open_weights(tmp_path / "nowhere")


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path, tiny_model("llama"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightError, match=r"config\.json is no proper JSON"):
        open_weights(tmp_path)


def test_closing_releases_the_files(tmp_path: Path) -> None:
    source = open_weights(make_folder(tmp_path, tiny_model("llama")))
    tensor = source.read("model.norm.weight", torch.float32)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    source.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert tensor.isfinite().all()
    with pytest.raises(WeightError, match="was closed"):
        source.read("model.norm.weight", torch.float32)


def test_transformers_loads_the_same_from_the_fixture_folder(tmp_path: Path) -> None:
    """The folders that these tests read are what transformers itself reads."""
    model = tiny_model("mixtral")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(make_folder(tmp_path, model), dtype=torch.float32)
    source = open_weights(tmp_path)
    for name, expected in loaded.state_dict().items():
        assert torch.equal(source.read(name, torch.float32), expected), name
