"""Write a GGUF file of random weights for a small mixture-of-experts model, as llama.cpp's converters would.

    python scripts/make_moe_gguf.py OUT.gguf --preset qwen3moe-1.7b --quant Q4_K [--vocab-from SmolLM2.gguf] [--seed 0]

Benchmarks and tests compare engines on such files. Weights are drawn as blocks of the storage type: valid bits whose values have a
mean of 0 and a variance of about 1 / inputs, so nothing needs to be quantised, and a seed gives the same weights everywhere. Needs
numpy and gguf.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter

FALL_BACKS = ("Q8_0", "F16")
"""What a matrix becomes whose rows the storage type doesn't divide."""
ROUTER_GAIN = 3.0
"""A router's logits are spread out by this: the last expert chosen then counts little, and so does choosing another."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    heads, kv_heads, head_dim  attention of Qwen3-MoE; of MLA, heads alone counts
    q_rank, kv_rank            widths of MLA's latents, and nope, rope, value those of its heads
    dense                      layers at the start that have no experts
    shared                     experts that every token passes through
    sigmoid                    DeepSeek-V3's router: sigmoid, with a bias, weights normed; otherwise V2's softmax
    """

    arch: str
    hidden: int
    layers: int
    heads: int
    experts: int
    chosen: int
    inner: int
    dense_inner: int
    context: int
    kv_heads: int = 1
    head_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    nope: int = 0
    rope: int = 0
    value: int = 0
    dense: int = 0
    shared: int = 0
    sigmoid: bool = True


_QWEN = Shape("qwen3moe", 1024, 16, 16, 64, 8, 512, 3072, 32768, kv_heads=4, head_dim=128)
_QWEN_TINY = Shape("qwen3moe", 256, 2, 4, 8, 2, 256, 512, 4096, kv_heads=2, head_dim=64)
_MLA = {"q_rank": 512, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128, "dense": 1, "shared": 1}
_MLA_TINY = {"q_rank": 256, "kv_rank": 256, "nope": 64, "rope": 32, "value": 64, "dense": 1, "shared": 1}
_DEEPSEEK = Shape("deepseek2", 1024, 12, 16, 64, 6, 512, 3072, 32768, **_MLA)
_DEEPSEEK_TINY = Shape("deepseek2", 256, 3, 4, 8, 2, 256, 512, 4096, **_MLA_TINY)
PRESETS = {
    "qwen3moe-1.7b": _QWEN,
    "qwen3moe-0.4b": replace(_QWEN, layers=4),
    "qwen3moe-tiny": _QWEN_TINY,
    "deepseek2-1.2b": _DEEPSEEK,
    "deepseek2-0.3b": replace(_DEEPSEEK, layers=4),
    "deepseek2-tiny": _DEEPSEEK_TINY,
    "deepseek2-softmax-tiny": replace(_DEEPSEEK_TINY, sigmoid=False),
}
QUANTS = ("F32", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K")


def make(out: Path, preset: str, quant: str, *, seed: int = 0, vocab: int = 512, vocab_from: Path | None = None) -> Path:
    """Write the model `preset` with matrices in `quant`; embedding, output and the halves of kv_b are Q8_0, routers and norms F32.

    vocab       tokens of a model without tokenizer
    vocab_from  a GGUF file whose tokenizer is copied instead
    """
    shape = PRESETS[preset]
    writer = GGUFWriter(out, shape.arch)
    if vocab_from is not None:
        vocab = copy_tokenizer(writer, vocab_from)
    else:
        writer.add_tokenizer_model("no_vocab")
    writer.add_name(f"random {preset} {quant}")
    add_metadata(writer, shape, vocab)
    rng = np.random.default_rng(seed)
    for name, size, kind in tensors(shape, vocab, quant):
        data = draw(name, size, kind, rng)
        writer.add_tensor(name, data, raw_shape=data.shape, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def copy_tokenizer(writer: GGUFWriter, source: Path) -> int:
    """Add another file's tokenizer, and return how many tokens it has."""
    tokens = 0
    for key, field in gguf.GGUFReader(source).fields.items():
        if not key.startswith("tokenizer."):
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
            tokens = len(field.contents()) if key == "tokenizer.ggml.tokens" else tokens
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    return tokens


def add_metadata(writer: GGUFWriter, shape: Shape, vocab: int) -> None:
    writer.add_quantization_version(2)
    writer.add_vocab_size(vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.dense_inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.chosen)
    writer.add_expert_feed_forward_length(shape.inner)
    if shape.arch == "qwen3moe":
        writer.add_rope_freq_base(1e6)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        return
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(shape.rope)
    writer.add_q_lora_rank(shape.q_rank)
    writer.add_kv_lora_rank(shape.kv_rank)
    writer.add_key_length(shape.kv_rank + shape.rope)
    writer.add_value_length(shape.kv_rank)
    writer.add_key_length_mla(shape.nope + shape.rope)
    writer.add_value_length_mla(shape.value)
    writer.add_leading_dense_block_count(shape.dense)
    writer.add_expert_shared_count(shape.shared)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(shape.sigmoid)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID if shape.sigmoid else ExpertGatingFuncType.SOFTMAX)


def tensors(shape: Shape, vocab: int, quant: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Every tensor's name, shape and storage type, in the file's order."""
    wide = quant if quant.startswith("F") else "Q8_0"
    found: list[tuple[str, tuple[int, ...], str]] = [
        ("token_embd.weight", (vocab, shape.hidden), wide),
        ("output_norm.weight", (shape.hidden,), "F32"),
        ("output.weight", (vocab, shape.hidden), wide),
    ]
    for layer in range(shape.layers):
        attention = _mla(shape, quant, wide) if shape.arch == "deepseek2" else _grouped_query(shape, quant)
        mlp = _dense(shape, quant) if layer < shape.dense else _experts(shape, quant)
        found += [(f"blk.{layer}.{name}", size, kind) for name, size, kind in [*attention, *mlp]]
    for name, size, kind in found:
        yield name, size, next(k for k in (kind, *FALL_BACKS) if size[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[k]][0] == 0)


def _grouped_query(shape: Shape, quant: str) -> list[tuple[str, tuple[int, ...], str]]:
    rows = {"q": shape.heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim, "v": shape.kv_heads * shape.head_dim}
    return [
        ("attn_norm.weight", (shape.hidden,), "F32"),
        *((f"attn_{name}.weight", (count, shape.hidden), quant) for name, count in rows.items()),
        ("attn_q_norm.weight", (shape.head_dim,), "F32"),
        ("attn_k_norm.weight", (shape.head_dim,), "F32"),
        ("attn_output.weight", (shape.hidden, rows["q"]), quant),
    ]


def _mla(shape: Shape, quant: str, wide: str) -> list[tuple[str, tuple[int, ...], str]]:
    """kv_b is written in two, the keys' half transposed in each head."""
    return [
        ("attn_norm.weight", (shape.hidden,), "F32"),
        ("attn_q_a.weight", (shape.q_rank, shape.hidden), quant),
        ("attn_q_a_norm.weight", (shape.q_rank,), "F32"),
        ("attn_q_b.weight", (shape.heads * (shape.nope + shape.rope), shape.q_rank), quant),
        ("attn_kv_a_mqa.weight", (shape.kv_rank + shape.rope, shape.hidden), quant),
        ("attn_kv_a_norm.weight", (shape.kv_rank,), "F32"),
        ("attn_k_b.weight", (shape.heads, shape.kv_rank, shape.nope), wide),
        ("attn_v_b.weight", (shape.heads, shape.value, shape.kv_rank), wide),
        ("attn_output.weight", (shape.hidden, shape.heads * shape.value), quant),
    ]


def _dense(shape: Shape, quant: str) -> list[tuple[str, tuple[int, ...], str]]:
    return [
        ("ffn_norm.weight", (shape.hidden,), "F32"),
        ("ffn_gate.weight", (shape.dense_inner, shape.hidden), quant),
        ("ffn_up.weight", (shape.dense_inner, shape.hidden), quant),
        ("ffn_down.weight", (shape.hidden, shape.dense_inner), quant),
    ]


def _experts(shape: Shape, quant: str) -> list[tuple[str, tuple[int, ...], str]]:
    found: list[tuple[str, tuple[int, ...], str]] = [
        ("ffn_norm.weight", (shape.hidden,), "F32"),
        ("ffn_gate_inp.weight", (shape.experts, shape.hidden), "F32"),
        ("ffn_gate_exps.weight", (shape.experts, shape.inner, shape.hidden), quant),
        ("ffn_up_exps.weight", (shape.experts, shape.inner, shape.hidden), quant),
        ("ffn_down_exps.weight", (shape.experts, shape.hidden, shape.inner), quant),
    ]
    if shape.arch == "deepseek2" and shape.sigmoid:
        found.append(("exp_probs_b.bias", (shape.experts,), "F32"))
    if shape.shared:
        width = shape.shared * shape.inner
        found += [
            ("ffn_gate_shexp.weight", (width, shape.hidden), quant),
            ("ffn_up_shexp.weight", (width, shape.hidden), quant),
            ("ffn_down_shexp.weight", (shape.hidden, width), quant),
        ]
    return found


def draw(name: str, size: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A tensor as its file holds it: float32 or float16, or the bytes of blocks, uint8 (..., bytes of a row)."""
    if len(size) == 1:
        numbers = rng.standard_normal(size).astype(np.float32)
        return 1 + numbers * np.float32(0.1) if name.endswith("norm.weight") else numbers * np.float32(0.01)
    deviation = size[-1] ** -0.5 * (ROUTER_GAIN if "ffn_gate_inp" in name else 1.0)
    if kind in ("F32", "F16"):
        return (rng.standard_normal(size, np.float32) * np.float32(deviation)).astype(np.float32 if kind == "F32" else np.float16)
    elements, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = _BLOCKS[kind](int(np.prod(size)) // elements, deviation, rng)
    return blocks.reshape(*size[:-1], -1)


def _bytes(rng: np.random.Generator, blocks: int, size: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(rng.bytes(blocks * size), np.uint8).reshape(blocks, size).copy()


def _halves(rng: np.random.Generator, blocks: int, middle: float) -> np.ndarray[Any, Any]:
    """Scales around `middle` as float16, in bytes (blocks, 2)."""
    return (rng.uniform(0.8, 1.2, (blocks, 1)) * middle).astype(np.float16).view(np.uint8)


def _signs(rng: np.random.Generator, blocks: int) -> np.ndarray[Any, Any]:
    """Bits (blocks, 2) that turn every other scale's sign, where a type's numbers have a mean of -0.5."""
    return rng.integers(0, 2, (blocks, 1), dtype=np.uint8) * np.array([[0, 128]], np.uint8)


def _q8_0(blocks: int, deviation: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A scale and 32 numbers from -128 to 127, whose deviation is 74."""
    made = _bytes(rng, blocks, 34)
    made[:, :2] = _halves(rng, blocks, deviation / 74)
    return made


def _q4_0(blocks: int, deviation: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A scale and 32 numbers from -8 to 7, whose deviation is 4.6."""
    made = _bytes(rng, blocks, 18)
    made[:, :2] = _halves(rng, blocks, deviation / 4.6) ^ _signs(rng, blocks)
    return made


def _q4_k(blocks: int, deviation: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Two scales, 8 times 6 bits of scale and of minimum, and 256 numbers from 0 to 15, which deviate by 4.6. A minimum is as large
    as its scale, 48 on average, and counts 7.5 times as much, so that each eighth has a mean of 0."""
    made = _bytes(rng, blocks, 144)
    scale = _halves(rng, blocks, deviation / 4.6 / 48)
    made[:, 0:2] = scale
    made[:, 2:4] = (scale.view(np.float16) * np.float16(7.5)).view(np.uint8)
    sixes = rng.integers(33, 64, (blocks, 8), dtype=np.uint8)
    low, high = sixes[:, :4], sixes[:, 4:]
    made[:, 4:8] = made[:, 8:12] = low | (high >> 4 << 6)
    made[:, 12:16] = (high & 15) | (high & 15) << 4
    return made


def _q6_k(blocks: int, deviation: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """256 numbers from -32 to 31, which deviate by 18.5, 16 scales, here from 32 to 64, and a scale for all."""
    made = _bytes(rng, blocks, 210)
    made[:, 192:208] = rng.integers(32, 65, (blocks, 16), dtype=np.uint8)
    made[:, 208:210] = _halves(rng, blocks, deviation / 18.5 / 48) ^ _signs(rng, blocks)
    return made


_BLOCKS = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q6_K": _q6_k}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF file of random weights for a small mixture-of-experts model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--quant", choices=QUANTS, default="Q4_K")
    parser.add_argument("--vocab-from", type=Path, metavar="GGUF", help="copy this file's tokenizer")
    parser.add_argument("--vocab", type=int, default=512, help="tokens of a model without tokenizer (default 512)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make(options.out, options.preset, options.quant, seed=options.seed, vocab=options.vocab, vocab_from=options.vocab_from)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
