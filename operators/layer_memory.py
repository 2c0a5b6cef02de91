"""What KDecoderLayer holds while it runs: its result, the kernels' memory, its cache, and where attention's module or a cache in
blocks takes part, what that does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktopt.operator import build_config
from ktopt.operators.dynamic import asked_bytes
from ktopt.operators.kernel_memory import TOGETHER, expert_bytes, slab_bytes
from ktopt.operators.latent_memory import FLOAT_BYTES, KEPT_BYTES, LatentSizes
from ktopt.operators.model_sizes import ModelSizes
from ktopt.operators.own_memory import kept_tokens, shape_of
from ktopt.placement import Running, Working
from ktopt.registry import find

FEW_LATENT = 16
"""Up to so many new tokens of a sequence the kernels attend to latents; for more its module does (modules/decoder_layer.py)."""


def layer_working(running: Running) -> Working:
    sizes = ModelSizes.of(running.model)
    result = running.rows * sizes.hidden * FLOAT_BYTES
    if running.item != FLOAT_BYTES:
        result += running.rows * sizes.hidden * running.item
    attention = next((step for step in running.below if step.role == "attention"), None)
    spec = find(attention.operator) if attention is not None else None
    kernels = _kernel_bytes(running, sizes)
    if attention is None or spec is None:
        return Working(0, result, kernels)
    config, _ = build_config(spec, attention.kwargs)
    below = [step for step in running.below if step.path.startswith(f"{attention.path}.")]
    inner = replace(running, step=attention, config=config or spec.config(), below=below)
    if spec.blocks:
        return Working(0, result + _blocked(running, sizes) + asked_bytes(running, inner.config), kernels)
    if LatentSizes.of(running.model) is not None:
        return _latent(running, inner, result, kernels, sizes)
    shape = shape_of(inner)
    if shape is None:
        return Working(0, result, kernels)
    token = 2 * shape.rows * shape.key_dim * _kept_item(running, "float16")
    cache = running.sequences * kept_tokens(running, shape) * token
    return Working(cache, result + (cache // 2 if running.tokens == 1 else 0), kernels)  # it may grow by a quarter then


def _kept_item(running: Running, otherwise: str) -> int:
    """Bytes of a number in the cache."""
    asked = str(getattr(running.config, "kv_dtype", "auto"))
    return KEPT_BYTES[otherwise if asked == "auto" else asked]


def _kernel_bytes(running: Running, sizes: ModelSizes) -> int:
    routed = next((step for step in running.below if step.role == "experts"), None)
    dense = routed is None or bool(running.model.get("first_k_dense_replace"))
    together = min(TOGETHER, running.tokens if running.tokens > 1 else running.sequences)
    made = slab_bytes(together, sizes if dense else replace(sizes, inner=0), LatentSizes.of(running.model))
    return made if routed is None else made + expert_bytes(together, sizes, routed.stored, sizes.shared_inner)


def _blocked(running: Running, sizes: ModelSizes) -> int:
    """Of a piece that meets blocks: its queries, the results so far, those with the next blocks, and both merged."""
    return 4 * running.rows * sizes.heads * sizes.head_dim * FLOAT_BYTES


def _latent(running: Running, attention: Running, result: int, kernels: int, sizes: ModelSizes) -> Working:
    """The module's attention on what the layer keeps latents in; of its result, that added to the input, and a copy, three at a
    time."""
    config: Any = attention.config
    if getattr(config, "kv_dtype", None) == "auto":
        asked = str(getattr(running.config, "kv_dtype", "auto"))
        config = replace(config, kv_dtype="bfloat16" if asked == "auto" else asked)
    spec = find(attention.step.operator)
    assert spec is not None
    own = spec if spec.working is not None else find("default")
    assert own is not None
    assert own.working is not None
    found = own.working(replace(attention, config=config))
    if running.tokens <= FEW_LATENT:
        return Working(found.cache_bytes, result, kernels)
    hidden = running.rows * sizes.hidden
    normed = hidden * running.item
    return Working(found.cache_bytes, max(normed + found.transient_bytes, 2 * normed + result), kernels)
