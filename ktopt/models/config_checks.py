"""What is looked at in a config.json before anything is built from it: that it is one, and that its model is of a sane size.

transformers has the last word on a config; this refuses, at once and in words, what would make it run for minutes or fail
obscurely.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktopt.diagnostics import KtoptError
from ktopt.models import family, runs_as
from ktopt.models.treefile import MODULES_MAX

FILE_MAX = 4 << 20
LAYERS_MAX = 1024
SIZE_MAX = 1 << 31

LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "depth",
)
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
SIZES = (
    "hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "head_dim",
    "num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "n_shared_experts", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")

POSITIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "rope_theta",
            "rope_local_base_freq", "rotary_emb_base")  # fmt: skip
"""Numbers that every output depends on, and that can't be 0 or less."""
MAY_BE_INFINITE = ("time_step_limit",)

NOT_BUILT_FROM = (
    "auto_map", "quantization_config", "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
)  # fmt: skip
"""Keys that a model is not built from: code in the folder, stored quantisation, kernels that would be fetched from the hub."""


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as a mapping. KtoptError where it can't be read or isn't a JSON object."""
    try:
        if path.stat().st_size > FILE_MAX:
            raise KtoptError(f"{path}: {path.stat().st_size:,} bytes are too many for a config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KtoptError(f"{path}: can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        what = "not JSON" if path.suffix == ".json" else "neither a GGUF file nor a config in JSON"
        raise KtoptError(f"{path}: {what}: {reason}") from error
    if not isinstance(config, dict):
        raise KtoptError(f"{path}: a config.json holds an object, not {type(config).__name__}")
    return config


def plain_config(config: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """A config with nothing in it that JSON hasn't: keys are strings, a torch.dtype is its name. KtoptError if nested too deep."""
    try:
        return {str(key): _plain(value) for key, value in config.items()}
    except RecursionError as error:
        raise KtoptError(f"{where}: nested too deeply") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value).removeprefix("torch.")


def check_config(config: Mapping[str, Any], where: str) -> str:
    """transformers' model_type for a config. KtoptError, which names `where`, for what can't be built."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise KtoptError(f"{where}: no model_type; is this a transformers config.json?")
    known = family(model_type)
    if known is not None:
        refusal = known.refuses(config)
        if refusal:
            raise KtoptError(f"{where}: {refusal}")
    model_type = runs_as(model_type)
    if not _has_code(model_type):
        raise KtoptError(f"{where}: transformers has no model_type {model_type!r}")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise KtoptError(f"{where}: architectures must be a list of class names, not {_short(architectures)}")
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None and dtype not in DTYPES:
        raise KtoptError(f"{where}: dtype is {dtype!r}; known are {', '.join(DTYPES)}")
    _check_sizes(config, where, depth=0)
    _check_numbers(config, where)
    return model_type


def _check_numbers(config: Mapping[str, Any], where: str, inside: str = "") -> None:
    """Refuse what JSON has no numbers for (NaN, Infinity, 1e999), and an epsilon or a rotary base that is not above 0."""
    for key, value in config.items():
        name = f"{inside}{key}"
        if isinstance(value, Mapping):
            _check_numbers(value, where, f"{name}.")
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, float) and not math.isfinite(item) and (math.isnan(item) or key not in MAY_BE_INFINITE):
                raise KtoptError(f"{where}: {name} is {item}, which is no number to compute with")
            if key in POSITIVE and isinstance(item, int | float) and item <= 0:
                raise KtoptError(f"{where}: {name} is {item}; it must be above 0")


def _check_sizes(config: Mapping[str, Any], where: str, depth: int) -> None:
    layers = max((_count(config, key, where, LAYERS_MAX) for key in LAYER_COUNTS), default=0)
    experts = max((_count(config, key, where, SIZE_MAX) for key in EXPERT_COUNTS), default=0)
    if layers * (16 + 4 * experts) > MODULES_MAX:
        raise KtoptError(f"{where}: {layers} layers of {experts} experts are more than {MODULES_MAX:,} modules")
    for key in SIZES:
        _count(config, key, where, SIZE_MAX)
    for key, value in config.items():
        if key.endswith("_layers") and isinstance(value, int):
            _count({key: max(value, 0)}, key, where, LAYERS_MAX)
        if isinstance(value, Mapping) and key.endswith("_config") and key not in NOT_BUILT_FROM:
            if depth >= 4:
                raise KtoptError(f"{where}: configs nested too deeply in {key}")
            _check_sizes(value, f"{where}: {key}", depth + 1)


def _count(config: Mapping[str, Any], key: str, where: str, limit: int) -> int:
    """A whole number of a config (0 where it is absent or null; the largest of a list, which some models give one per layer)."""
    value = config.get(key)
    if value is None:
        return 0
    items = value if isinstance(value, list) else [value]
    if len(items) > LAYERS_MAX or not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
        raise KtoptError(f"{where}: {key} must be a whole number, not {_short(value)}")
    largest = max(items, default=0)
    if largest > limit:
        raise KtoptError(f"{where}: {key} is {largest:,}; ktopt takes at most {limit:,}")
    return largest


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _has_code(model_type: str) -> bool:
    """Whether transformers can know a model_type: whether the source of its auto classes names it. Importing them takes seconds."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return True
    sources = list((Path(spec.submodule_search_locations[0]) / "models" / "auto").glob("*.py"))
    return not sources or any(f'"{model_type}"' in source.read_text(encoding="utf-8") for source in sources)
