"""The rotary embedding's parameters from GGUF metadata, in transformers v5's `rope_parameters` form.

Linear and YaRN scaling are metadata. Llama 3's scaling is not: llama.cpp stores its per-frequency factors as the tensor
rope_freqs, from which the parameters are found again by trying the published ones.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from ktopt.weights.source import WeightError

if TYPE_CHECKING:
    from ktopt.weights.gguf_config import HyperParameters

GEMMA3_LOCAL_THETA = 10000.0
LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(keys: HyperParameters, config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of the config so far; for Gemma 3 one set a layer type."""
    rope = _scaled(keys, keys.positive("rope.freq_base", 10000.0), config)
    if config["model_type"] == "gemma3_text":
        local = keys.positive("rope.freq_base_swa", GEMMA3_LOCAL_THETA)
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    rotary = keys.count("rope.dimension_count", 0)
    if rotary and rotary != config["head_dim"]:
        rope["partial_rotary_factor"] = rotary / config["head_dim"]
    return rope


def _scaled(keys: HyperParameters, theta: float, config: dict[str, Any]) -> dict[str, Any]:
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    if kind == "yarn":
        return {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **_yarn(keys, config)}
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "none":
        raise WeightError(f"{keys.file.path}: {keys.arch}.rope.scaling.type is {kind!r}; none, linear and yarn can be read")
    if "rope_freqs.weight" in keys.file.tensors:
        return {"rope_type": "llama3", "rope_theta": theta, **_llama3(keys, theta)}
    return {"rope_type": "default", "rope_theta": theta}


def _yarn(keys: HyperParameters, config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length"),
        "beta_fast": keys.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.real("rope.scaling.yarn_beta_slow", 1.0),
    }
    if "rope.scaling.yarn_log_multiplier" in keys:
        # DeepSeek's converters write a tenth of mscale_all_dim, and its models all have mscale equal to it.
        found["mscale"] = found["mscale_all_dim"] = round(10 * keys.real("rope.scaling.yarn_log_multiplier"), 6)
    return found


def _llama3(keys: HyperParameters, theta: float) -> dict[str, Any]:
    tensor = keys.file.tensors["rope_freqs.weight"]
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 1 << 16:
        raise WeightError(
            f"{keys.file.path}: rope_freqs.weight should be a short F32 vector, is {tensor.type} {list(tensor.shape)}"
        )
    data = keys.file.parts[tensor.part].data
    found = struct.unpack_from(f"<{tensor.shape[0]}f", data, tensor.offset)
    for factor in LLAMA3_FACTORS:
        expected = _llama3_factors(theta, 2 * len(found), factor)
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(found, expected, strict=True)):
            return {"factor": factor, **LLAMA3}
    raise WeightError(
        f"{keys.file.path}: rope_freqs.weight holds frequency factors other than Llama 3's; the model can't be described"
    )


def _llama3_factors(theta: float, dimensions: int, factor: float) -> list[float]:
    """What each rotary frequency is divided by: 1 for short waves, `factor` for long ones, blended between."""
    low = LLAMA3["original_max_position_embeddings"] / LLAMA3["low_freq_factor"]
    high = LLAMA3["original_max_position_embeddings"] / LLAMA3["high_freq_factor"]
    factors = []
    for index in range(0, dimensions, 2):
        wave = 2 * math.pi * theta ** (index / dimensions)
        blend = (LLAMA3["original_max_position_embeddings"] / wave - LLAMA3["low_freq_factor"]) / (
            LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"]
        )
        factors.append(1.0 if wave < high else factor if wave > low else 1 / ((1 - blend) / factor + blend))
    return factors
