"""What ktopt makes of SmolLM2 writes what transformers writes, token for token, from the same dequantised weights.

The reference is a plain LlamaForCausalLM whose weights this file reads by itself: with gguf's reader and dequantiser, its own table
of names, and its own undoing of llama.cpp's row order of the query and key projections.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ktopt
from ktopt.kernels import cpu
from ktopt.weights.tokenizer import find_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = Path(__file__).resolve().parents[1] / "rules" / "smollm2"
PROMPT = ["A", "Ġcompiler", "Ġis", "Ġa", "Ġprogram", "Ġthat"]
NEW_TOKENS = 48
TEXT_TOKENS = 256

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@pytest.fixture(scope="module")
def reader(smollm2: Path) -> Any:
    from gguf import GGUFReader

    return GGUFReader(smollm2)


@pytest.fixture(scope="module")
def plain(reader: Any) -> LlamaForCausalLM:
    """transformers' own model with the dequantised weights, in float32."""
    from gguf.quants import dequantize

    def value(key: str) -> Any:
        return reader.get_field(f"llama.{key}").contents()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        array = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        name = hf_name(tensor.name)
        if ".q_proj." in name:
            array = rows_in_halves(array, heads)
        elif ".k_proj." in name:
            array = rows_in_halves(array, kv_heads)
        state[name] = array
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    config = LlamaConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        max_position_embeddings=value("context_length"),
    )
    with torch.device("meta"):  # no random weights first
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


def hf_name(stored: str) -> str:
    head, _, kind = stored.rpartition(".")
    if head in TOP_NAMES:
        return f"{TOP_NAMES[head]}.{kind}"
    _, layer, part = head.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def rows_in_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the two halves that rotary embedding turns against each other; transformers keeps them apart."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


@pytest.fixture(scope="module")
def prompt(reader: Any) -> torch.Tensor:
    words = reader.get_field("tokenizer.ggml.tokens").contents()
    return torch.tensor([[words.index(word) for word in PROMPT]])


@pytest.fixture(scope="module")
def optimized(smollm2: Path) -> Any:
    return ktopt.apply(ktopt.compile(RULES / "reference.yaml", "smollm2-135m"), weights=smollm2)


@pytest.fixture(scope="module")
def quantized(smollm2: Path) -> Any:
    """With linears that compute on the stored blocks, activations rounded to 8 bits."""
    if not cpu.available()[0]:
        pytest.skip(cpu.available()[1])
    return ktopt.apply(ktopt.compile(RULES / "cpu.yaml", "smollm2-135m"), weights=smollm2)


def greedy(model: Any, prompt: torch.Tensor) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, prompt.shape[1] :].tolist()


@pytest.fixture(scope="module")
def plain_text(plain: LlamaForCausalLM, prompt: torch.Tensor) -> list[int]:
    return greedy(plain, prompt)


def test_the_greedy_text_is_transformers_own(optimized: Any, plain_text: list[int], prompt: torch.Tensor) -> None:
    assert len(set(plain_text)) > 10, "the reference should say something"
    assert greedy(optimized, prompt) == plain_text


def test_the_logits_are_transformers_own(optimized: Any, plain: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    with torch.inference_mode():
        difference = (optimized(prompt).logits - plain(prompt).logits).abs().max().item()
    assert difference < 1e-3, f"logits differ by up to {difference}"


@pytest.mark.parametrize("tokens", [8, TEXT_TOKENS])
def test_the_cpu_kernels_keep_to_the_floating_point_logits(quantized: Any, plain: Any, smollm2: Path, tokens: int) -> None:
    """A text given whole runs the products of many tokens, and given 8 tokens at a time the kernels of few."""
    text = find_tokenizer((smollm2,)).encode(inspect.getsource(argparse)[:4000])[:TEXT_TOKENS]
    ids = torch.tensor([text])
    expected, found = log_probabilities(plain, ids, TEXT_TOKENS), log_probabilities(quantized, ids, tokens)
    divergence = (expected.exp() * (expected - found)).sum(-1).mean().item()
    same = (expected.argmax(-1) == found.argmax(-1)).float().mean().item()
    assert divergence <= 0.006
    assert same >= 0.95


def log_probabilities(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """log-probabilities (T, vocabulary) after each token of a text fed `tokens` at a time."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        pieces = [model(part, cache=cache, use_cache=True).logits[0] for part in ids.split(tokens, dim=1)]
    return torch.cat(pieces).log_softmax(-1)


def test_the_linears_were_replaced(optimized: Any, quantized: Any) -> None:
    for model, expected in ((optimized, "KTransformersLinear"), (quantized, "KLinearCPUInfer")):
        assert {type(module).__name__ for name, module in model.named_modules() if name.endswith("_proj")} == {expected}
    assert "stored as Q4_1" in repr(quantized.model.layers[0].mlp.up_proj)


def test_the_rows_of_a_projection_return_to_their_places() -> None:
    # Two heads of width four: llama.cpp stores each head's rows as 0, 2, 1, 3.
    stored = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7], dtype=torch.float32)[:, None]
    assert rows_in_halves(stored, 2).flatten().tolist() == list(range(8))
