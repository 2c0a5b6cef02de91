"""A transformers config from a GGUF file's metadata: sizes, rotary embedding, experts, special tokens.

Only what the file says or what the architecture fixes is set; transformers' own defaults are never relied on for a size. A key
that is missing or of the wrong type is a WeightError that names it. Imports neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktopt.weights.gguf import GGUFFile, open_gguf
from ktopt.weights.names import check_model_type, decoder_layers
from ktopt.weights.rope_config import rope_parameters
from ktopt.weights.source import WeightError

Config = dict[str, Any]
SIGMOID = 2


class HyperParameters:
    """Typed access to the metadata of the file's architecture: `count("block_count")` is llama.block_count of a llama file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.arch, self.metadata = file, file.architecture, file.metadata

    def __contains__(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def _get(self, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        full = f"{self.arch}.{key}"
        if full not in self.metadata:
            if default is None:
                raise WeightError(f"{self.file.path}: the metadata lacks {full}, which the model's config needs")
            return default
        value = self.metadata[full]
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if not isinstance(value, kinds) or isinstance(value, bool) is not (bool in kinds):
            raise WeightError(f"{self.file.path}: the metadata key {full} is {_brief(value)}, not {what}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A number of at least 0."""
        value: int = self._get(key, (int,), "a whole number", default)
        if not 0 <= value <= 1 << 40:
            raise WeightError(f"{self.file.path}: the metadata key {self.arch}.{key} is {value}, which is no size")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A number of at least 1."""
        value = self.count(key, default)
        if value < 1:
            raise WeightError(f"{self.file.path}: the metadata key {self.arch}.{key} is {value}; it must be at least 1")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number that is finite."""
        value = self._get(key, (float, int), "a number", default)
        if not math.isfinite(value):
            raise WeightError(f"{self.file.path}: the metadata key {self.arch}.{key} is {value}; no model computes with that")
        return _short(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.real(key, default)
        if value <= 0:
            raise WeightError(f"{self.file.path}: the metadata key {self.arch}.{key} is {value}; it must be above 0")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value: bool = self._get(key, (bool,), "true or false", default)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._get(key, (str,), "a text", default)
        return value

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors


def config_from_gguf(source: str | Path | GGUFFile) -> Config:
    """The transformers config of the model in a GGUF file (a path, or a file already open), as config.json would hold it."""
    if not isinstance(source, GGUFFile):
        opened = open_gguf(source)
        try:
            return config_from_gguf(opened)
        finally:
            opened.close()
    check_model_type(source.architecture, "", str(source.path))
    keys = HyperParameters(source)
    config = _common(keys)
    ARCHITECTURES[source.architecture](keys, config)
    config["rope_parameters"] = rope_parameters(keys, config)
    return config


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _short(value: Any) -> float:
    """A float32 of the file as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    return float(f"{float(value):.7g}")


def _common(keys: HyperParameters) -> Config:
    heads = keys.size("attention.head_count")
    hidden = keys.size("embedding_length")
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise WeightError(f"{keys.file.path}: token_embd.weight is missing or not [vocabulary, {hidden}]")
    config: Config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": decoder_layers(keys.file),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": keys.size("attention.key_length", keys.size("rope.dimension_count", max(1, hidden // heads))),
        "intermediate_size": keys.count("feed_forward_length"),
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
    }
    for name in ("bos", "eos"):
        if (token := keys.metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    if (token := keys.metadata.get("tokenizer.ggml.padding_token_id")) is not None:
        config["pad_token_id"] = token
    return config


def _named(config: Config, model_type: str, cls: str) -> None:
    config["model_type"], config["architectures"] = model_type, [cls]


def _llama(keys: HyperParameters, config: Config) -> None:
    if keys.count("expert_count", 0):
        _named(config, "mixtral", "MixtralForCausalLM")
        config.update(num_local_experts=keys.size("expert_count"), num_experts_per_tok=keys.size("expert_used_count"))
        return
    _named(config, "llama", "LlamaForCausalLM")
    config["attention_bias"] = keys.has_tensor("blk.0.attn_q.bias")
    config["mlp_bias"] = keys.has_tensor("blk.0.ffn_up.bias")


def _qwen2(keys: HyperParameters, config: Config) -> None:
    _named(config, "qwen2", "Qwen2ForCausalLM")
    config["use_sliding_window"] = False


def _qwen3(keys: HyperParameters, config: Config) -> None:
    _named(config, "qwen3", "Qwen3ForCausalLM")
    config["attention_bias"] = keys.has_tensor("blk.0.attn_q.bias")


def _experts(keys: HyperParameters, config: Config) -> None:
    config.update(
        num_experts=keys.size("expert_count"),
        num_experts_per_tok=keys.size("expert_used_count"),
        moe_intermediate_size=keys.size("expert_feed_forward_length"),
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _qwen2_moe(keys: HyperParameters, config: Config) -> None:
    _named(config, "qwen2_moe", "Qwen2MoeForCausalLM")
    _experts(keys, config)
    config["shared_expert_intermediate_size"] = keys.size("expert_shared_feed_forward_length")
    config["norm_topk_prob"] = keys.flag("expert_weights_norm", False)
    config["qkv_bias"] = keys.has_tensor("blk.0.attn_q.bias")


def _qwen3_moe(keys: HyperParameters, config: Config) -> None:
    _named(config, "qwen3_moe", "Qwen3MoeForCausalLM")
    _experts(keys, config)
    config["norm_topk_prob"] = keys.flag("expert_weights_norm", True)


def _qwen3_next(keys: HyperParameters, config: Config) -> None:
    _named(config, "qwen3_next", "Qwen3NextForCausalLM")
    _experts(keys, config)
    value_heads = keys.size("ssm.time_step_rank")
    every = keys.size("full_attention_interval", 4)
    config.update(
        shared_expert_intermediate_size=keys.size("expert_shared_feed_forward_length"),
        norm_topk_prob=keys.flag("expert_weights_norm", True),
        linear_conv_kernel_dim=keys.size("ssm.conv_kernel"),
        linear_num_key_heads=keys.size("ssm.group_count"),
        linear_num_value_heads=value_heads,
        linear_key_head_dim=keys.size("ssm.state_size"),
        linear_value_head_dim=keys.size("ssm.inner_size") // value_heads,
        layer_types=[
            "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(config["num_hidden_layers"])
        ],
    )


def _deepseek(keys: HyperParameters, config: Config) -> None:
    """Both ways of writing MLA: by newer converters as one latent head, with the real sizes under *_mla, or with the real sizes."""
    sigmoid = keys.count("expert_gating_func", 1) == SIGMOID
    _named(config, *(("deepseek_v3", "DeepseekV3ForCausalLM") if sigmoid else ("deepseek_v2", "DeepseekV2ForCausalLM")))
    rope = keys.size("rope.dimension_count")
    nope = keys.size("attention.key_length_mla", keys.size("attention.key_length")) - rope
    if nope < 1:
        raise WeightError(f"{keys.file.path}: the head size is not larger than {keys.arch}.rope.dimension_count, {rope}")
    groups = keys.count("expert_group_count", 1) or 1
    config["scoring_func"] = "sigmoid" if sigmoid else "softmax"
    config["topk_method"] = "noaux_tc" if sigmoid else "group_limited_greedy" if groups > 1 else "greedy"
    config.update(
        num_key_value_heads=config["num_attention_heads"],
        head_dim=rope,
        q_lora_rank=keys.size("attention.q_lora_rank") if "attention.q_lora_rank" in keys else None,
        kv_lora_rank=keys.size("attention.kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=keys.size("attention.value_length_mla", keys.size("attention.value_length")),
        n_group=groups,
        topk_group=keys.count("expert_group_used_count", 1) or 1,
        norm_topk_prob=keys.flag("expert_weights_norm", sigmoid),
    )
    _shared_experts(keys, config)


def _shared_experts(keys: HyperParameters, config: Config) -> None:
    config.update(
        n_routed_experts=keys.size("expert_count"),
        num_experts_per_tok=keys.size("expert_used_count"),
        moe_intermediate_size=keys.size("expert_feed_forward_length"),
        n_shared_experts=keys.count("expert_shared_count"),
        first_k_dense_replace=keys.count("leading_dense_block_count", 0),
        routed_scaling_factor=keys.real("expert_weights_scale", 1.0),
    )


def _gemma3(keys: HyperParameters, config: Config) -> None:
    _named(config, "gemma3_text", "Gemma3ForCausalLM")
    del config["hidden_act"]
    config["sliding_window"] = keys.size("attention.sliding_window")
    pattern = keys.size("attention.sliding_window_pattern", 6)
    config["layer_types"] = [
        "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(config["num_hidden_layers"])
    ]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    # Gemma's 27B, with its 62 layers, scales attention by the width of a head's share of the hidden size, the others by head_dim.
    shared = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = shared if config["num_hidden_layers"] == 62 else config["head_dim"]


def _glm4_moe(keys: HyperParameters, config: Config) -> None:
    _named(config, "glm4_moe", "Glm4MoeForCausalLM")
    _shared_experts(keys, config)
    config.update(
        n_group=keys.count("expert_group_count", 1) or 1,
        topk_group=keys.count("expert_group_used_count", 1) or 1,
        norm_topk_prob=keys.flag("expert_weights_norm", True),
        attention_bias=keys.has_tensor("blk.0.attn_q.bias"),
        use_qk_norm=keys.has_tensor("blk.0.attn_q_norm.weight"),
    )


ARCHITECTURES: dict[str, Callable[[HyperParameters, Config], None]] = {
    "llama": _llama,
    "internlm2": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3next": _qwen3_next,
    "deepseek2": _deepseek,
    "gemma3": _gemma3,
    "glm4moe": _glm4_moe,
}
