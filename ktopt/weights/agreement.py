"""Whether a weight file says of itself what the model's config says: another model's weights often have the right shapes.

`gguf_contradictions` compares GGUF metadata with a config, `config_contradictions` one config with another. What one of the two
leaves open isn't compared. Imports neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ktopt.models import runs_as
from ktopt.weights.gguf import GGUFFile

COMPARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "n_routed_experts", "num_local_experts",
    "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "scoring_func",
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings",
)  # fmt: skip
"""Keys of a config that decide what a model computes, with one meaning in every model."""

ONLY_SPARSE = ("qwen2_moe", "qwen3_moe", "qwen3_next")
"""Models whose files have experts in every layer, so that their feed_forward_length means nothing."""
GATING_FUNCTIONS = {"softmax": 1, "sigmoid": 2}


@dataclass(frozen=True, slots=True)
class Contradiction:
    """What a file says otherwise than the model: under which key, each one's value, and the key of a config that it means."""

    key: str
    file: Any
    model: Any
    means: str

    def __str__(self) -> str:
        models = "the model's" if self.key == self.means else f"the model's {self.means} makes it"
        return f"{self.key} is {_shown(self.file)}, and {models} {_shown(self.model)}"


def config_contradictions(file: Mapping[str, Any], model: Mapping[str, Any]) -> list[Contradiction]:
    """On what two configs in transformers' terms differ, where both say it."""
    file, model = _text_part(file), _text_part(model)
    pairs = [(key, file.get(key), model.get(key)) for key in COMPARED]
    pairs += [(key, value, dict(_rope(model)).get(key)) for key, value in _rope(file)]
    pairs.append(("model_type", _built(file), _built(model)))
    return [Contradiction(key, mine, theirs, key) for key, mine, theirs in pairs if not agree(mine, theirs)]


def gguf_contradictions(file: GGUFFile, config: Mapping[str, Any]) -> list[Contradiction]:
    """On what a GGUF file's metadata and a model's config differ, where both say it."""
    config = _text_part(config)
    found = []
    for key, expected, means in _gguf_values(file, config):
        value = file.metadata.get(f"{file.architecture}.{key}")
        if isinstance(value, list):
            if not value or any(v != value[0] for v in value):
                continue  # one a layer
            value = value[0]
        if not agree(value, expected):
            found.append(Contradiction(f"{file.architecture}.{key}", value, expected, means))
    if "output.weight" not in file.tensors and config.get("tie_word_embeddings") is False:
        found.append(Contradiction("output.weight", "not there", "a tensor of its own", "tie_word_embeddings"))
    if "rope_freqs.weight" in file.tensors and dict(_rope(config)).get("rope_type", "llama3") != "llama3":
        found.append(Contradiction("rope_freqs.weight", "there", "no tensor", "rope_type"))
    return found


def agree(one: Any, other: Any) -> bool:
    """Whether two values mean the same; None agrees with everything, and numbers of a file may be in float32."""
    if one is None or other is None:
        return True
    if isinstance(one, bool) or isinstance(other, bool) or not isinstance(one, int | float) or not isinstance(other, int | float):
        return bool(one == other)
    return one == other or math.isclose(one, other, rel_tol=1e-5)


def _gguf_values(file: GGUFFile, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(key without the architecture, its value for this config, the config's key); None where the config leaves it open."""
    get = config.get
    further = file.metadata.get(f"{file.architecture}.nextn_predict_layers", 0)
    layers = get("num_hidden_layers")
    counted = isinstance(layers, int) and isinstance(further, int)
    yield "block_count", layers + further if counted else None, "num_hidden_layers"
    for key, means in (
        ("embedding_length", "hidden_size"), ("attention.head_count", "num_attention_heads"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"), ("attention.sliding_window", "sliding_window"),
        ("attention.q_lora_rank", "q_lora_rank"), ("attention.kv_lora_rank", "kv_lora_rank"),
        ("attention.value_length_mla", "v_head_dim"), ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"), ("expert_shared_count", "n_shared_experts"),
        ("leading_dense_block_count", "first_k_dense_replace"), ("expert_group_count", "n_group"),
        ("expert_group_used_count", "topk_group"), ("expert_weights_norm", "norm_topk_prob"),
        ("expert_weights_scale", "routed_scaling_factor"),
    ):  # fmt: skip
        yield key, get(means), means
    if get("model_type") not in ONLY_SPARSE:
        yield "feed_forward_length", get("intermediate_size"), "intermediate_size"
    experts = next((key for key in ("n_routed_experts", "num_experts", "num_local_experts") if get(key) is not None), "num_experts")
    yield "expert_count", get(experts), experts
    yield "expert_gating_func", GATING_FUNCTIONS.get(str(get("scoring_func"))), "scoring_func"
    yield from _gguf_heads(config)
    rope = dict(_rope(config))
    yield "rope.freq_base", rope.get("rope_theta"), "rope_theta"
    scaling = file.metadata.get(f"{file.architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        yield "rope.scaling.type", rope.get("rope_type"), "rope_type"
        yield "rope.scaling.factor", rope.get("factor"), "rope_parameters.factor"


def _gguf_heads(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    get = config.get
    if get("kv_lora_rank") is not None:
        nope, rope = get("qk_nope_head_dim"), get("qk_rope_head_dim")
        yield "rope.dimension_count", rope, "qk_rope_head_dim"
        yield "attention.key_length_mla", nope + rope if isinstance(nope, int) and isinstance(rope, int) else None, "head sizes"
        return
    heads, hidden, size = get("num_attention_heads"), get("hidden_size"), get("head_dim")
    if size is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        size = hidden // heads
    kv = get("num_key_value_heads")
    yield "attention.head_count_kv", heads if kv is None else kv, "num_key_value_heads"
    yield "attention.key_length", size, "head_dim"
    yield "attention.value_length", size, "head_dim"
    partial = dict(_rope(config)).get("partial_rotary_factor")
    partial = 1.0 if partial is None else partial
    if isinstance(size, int) and isinstance(partial, int | float):
        yield "rope.dimension_count", int(size * partial), "head_dim"


def _rope(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The rotary embedding's parameters, from both spellings; of the layers with full attention where layers differ in them."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope) if isinstance(rope, Mapping) else {}
    if not isinstance(rope, Mapping):
        return
    yield "rope_theta", rope.get("rope_theta", config.get("rope_theta"))
    yield "partial_rotary_factor", rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "rope_parameters" in config or "rope_scaling" in config:
        yield "rope_type", rope.get("rope_type", rope.get("type")) or "default"
    yield "factor", rope.get("factor")


def _built(config: Mapping[str, Any]) -> str | None:
    model_type = config.get("model_type")
    return runs_as(model_type) if isinstance(model_type, str) else None


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model in one of several parts."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and "hidden_size" not in config else config


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
