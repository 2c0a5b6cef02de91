"""scripts/make_moe_gguf.py: the models that benchmarks and tests run hold what they claim to, and a seed makes the same again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ktopt.weights.gguf_config import config_from_gguf

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "make_moe_gguf.py"


@pytest.fixture(scope="module")
def maker() -> Any:
    import sys

    spec = importlib.util.spec_from_file_location("make_moe_gguf", SCRIPT)
    assert spec
    assert spec.loader
    module = sys.modules["make_moe_gguf"] = importlib.util.module_from_spec(spec)  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("quant", ["F32", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_drawn_weights_are_centred_and_of_the_size_that_keeps_activations(maker: Any, tmp_path: Path, quant: str) -> None:
    path = maker.make(tmp_path / "m.gguf", "qwen3moe-tiny", quant)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_gate_exps.weight", "blk.1.ffn_down_exps.weight"):
        assert tensors[name].tensor_type.name == quant
        values = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type).astype(np.float64)
        size = values.shape[-1] ** -0.5
        assert abs(values.mean()) < 0.02 * size
        assert values.std() == pytest.approx(size, rel=0.1)


def test_a_seed_makes_the_same_weights_and_another_seed_others(maker: Any, tmp_path: Path) -> None:
    files = [maker.make(tmp_path / f"{i}.gguf", "deepseek2-tiny", "Q4_K", seed=seed) for i, seed in enumerate((3, 3, 4))]
    first, again, other = (path.read_bytes() for path in files)
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("preset", "model_type"),
    [("qwen3moe-tiny", "qwen3_moe"), ("deepseek2-tiny", "deepseek_v3"), ("deepseek2-softmax-tiny", "deepseek_v2")],
)
def test_a_preset_is_the_model_that_its_name_says(maker: Any, tmp_path: Path, preset: str, model_type: str) -> None:
    config = config_from_gguf(maker.make(tmp_path / "m.gguf", preset, "Q8_0"))
    shape = maker.PRESETS[preset]
    assert config["model_type"] == model_type
    assert config["num_hidden_layers"] == shape.layers
    assert config["moe_intermediate_size"] == shape.inner
    assert config.get("num_experts", config.get("n_routed_experts")) == shape.experts


def test_the_benchmark_s_models_have_the_sizes_in_their_names(maker: Any) -> None:
    for preset, billions in (("qwen3moe-1.7b", 1.7), ("deepseek2-1.2b", 1.2)):
        tensors = maker.tensors(maker.PRESETS[preset], 32000, "Q4_K")
        assert sum(np.prod(size) for _, size, _ in tensors) / 1e9 == pytest.approx(billions, rel=0.1)


def test_a_tokenizer_is_copied(maker: Any, tmp_path: Path) -> None:
    from gguf_fixtures import make_gguf, tiny_model

    source = make_gguf(tmp_path / "source.gguf", tiny_model("llama"))
    made = gguf.GGUFReader(maker.make(tmp_path / "m.gguf", "qwen3moe-tiny", "Q8_0", vocab_from=source))
    wanted = gguf.GGUFReader(source).get_field("tokenizer.ggml.tokens").contents()
    assert made.get_field("tokenizer.ggml.tokens").contents() == wanted
    assert next(t for t in made.tensors if t.name == "token_embd.weight").shape.tolist() == [256, len(wanted)]
