"""A decoder layer's children as the CPU kernels take them, or why they can't: for KDecoderLayer.

Only layers whose forward is known are taken (LAYERS in operators/layer.py): what a child computes is read from its class and its
attributes, and anything unforeseen is a reason to refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ktopt.cache.latent import PAGE_TOKENS
from ktopt.kernels import cpu
from ktopt.operators.modules.fusing_experts import routed
from ktopt.operators.modules.latent_matrices import LatentMatrices
from ktopt.operators.modules.watching import CannotFuse, Watched, bundle, norm_of, only, parts_of

ACTIVATIONS = {"SiLUActivation": 0, "SiLU": 0, "GELUTanh": 1, "ReLU": 2}
"""The kernels' numbers of the activations that they have."""


@dataclass(eq=False)
class Fused:
    """A layer that the kernels can run.

    index            the layer's number in the cache
    heads, kv_heads, head_dim, window, scale   of grouped-query attention; window 0 for none
    latent           of latent attention, the numbers of a token's latent and of its rotary key; None for grouped-query attention
    page_tokens      of its cache
    config, dropout  the attention's
    run, run_latent, run_mlp, run_before, run_after, run_paged   the extension's functions on the layer; None without weights
    """

    index: int
    watched: Watched
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    scale: float = 0.0
    latent: tuple[int, int] | None = None
    page_tokens: int = PAGE_TOKENS
    config: Any = None
    dropout: float = 0.0
    run: Callable[..., None] | None = None
    run_latent: Callable[..., None] | None = None
    run_mlp: Callable[..., None] | None = None
    run_before: Callable[..., None] | None = None
    run_after: Callable[..., None] | None = None
    run_paged: Callable[..., None] | None = None

    def stands(self) -> bool:
        """Whether the children are still those that it was made of, and without hooks."""
        return self.watched.stands()


def describe(layer: Any) -> Fused | str:
    """The layer for the kernels, or why it can't be. On the meta device, before weights are there, only the reasons count."""
    watched = Watched()
    try:
        fused, description = _layer(layer, watched)
        fused.hidden = description["hidden"]
        watched.attributes(layer.self_attn, "scaling", "layer_idx", "is_causal", "sliding_window", "attention_dropout", "config")
        fused.config, fused.dropout = layer.self_attn.config, float(getattr(layer.self_attn, "attention_dropout", 0.0) or 0.0)
        if any(watched.hooks) and watched.calls_back():
            return "a part of it has a hook"
        if not any(parameter.is_meta for parameter in layer.parameters()):
            runners = cpu.layer_runners(description)
            fused.run, fused.run_latent, fused.run_mlp, fused.run_before, fused.run_after, fused.run_paged = runners
        return fused
    except CannotFuse as reason:
        return str(reason)
    except ValueError as error:  # sizes that only the extension refuses
        return str(error)


def _layer(layer: Any, watched: Watched) -> tuple[Fused, dict[str, Any]]:
    watched.add(layer)
    norms = {name for name in layer._modules if name.endswith("layernorm")}
    only(layer, {"self_attn", "mlp"} | norms)
    four = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}
    if norms == four:
        after_attention, before_mlp, after_mlp = (
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    elif norms == {"input_layernorm", "post_attention_layernorm"}:
        after_attention, before_mlp, after_mlp = "", "post_attention_layernorm", ""
    else:
        raise CannotFuse(f"its norms are {', '.join(sorted(norms))}")
    hidden = layer.self_attn.o_proj.out_features
    made = {
        "before_attention": norm_of(layer.input_layernorm, hidden, watched),
        "after_attention": norm_of(getattr(layer, after_attention), hidden, watched) if after_attention else None,
        "before_mlp": norm_of(getattr(layer, before_mlp), hidden, watched),
        "after_mlp": norm_of(getattr(layer, after_mlp), hidden, watched) if after_mlp else None,
    }
    mlp = routed(layer.mlp, watched) if "experts" in layer.mlp._modules else _mlp(layer.mlp, watched)
    if "kv_b_proj" in layer.self_attn._modules:
        fused, attention = latent_attention(layer.self_attn, watched)
    else:
        fused, attention = _attention(layer.self_attn, watched)
    return fused, {**made, **attention, **mlp}


def _attention(attention: Any, watched: Watched) -> tuple[Fused, dict[str, Any]]:
    watched.add(attention)
    only(attention, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
    if getattr(attention, "attn_logit_softcapping", None) is not None:
        raise CannotFuse("its attention caps its logits")
    if not getattr(attention, "is_causal", True):
        raise CannotFuse("its attention sees later tokens")
    dim = attention.head_dim
    if dim % 16 or dim > 1024:
        raise CannotFuse(f"the kernels take heads of a multiple of 16 numbers, not {dim}")
    rotary = attention.config.rope_parameters or {}
    rotary = rotary.get(getattr(attention, "layer_type", None) or "", rotary)
    if rotary.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise CannotFuse("its attention rotates a part of each head")
    kv_heads = attention.k_proj.out_features // dim
    heads, scale = attention.q_proj.out_features // dim, float(attention.scaling)
    fused = Fused(
        attention.layer_idx, watched, heads=heads, kv_heads=kv_heads, head_dim=dim, window=_window(attention), scale=scale
    )
    return fused, {
        "hidden": attention.q_proj.in_features,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "rotary_dim": dim,
        "window": fused.window,
        "scale": scale,
        "q_norm": norm_of(attention.q_norm, dim, watched) if "q_norm" in attention._modules else None,
        "k_norm": norm_of(attention.k_norm, dim, watched) if "k_norm" in attention._modules else None,
        "qkv": bundle(watched, attention.q_proj, attention.k_proj, attention.v_proj),
        "output": bundle(watched, attention.o_proj),
    }


def latent_attention(attention: Any, watched: Watched) -> tuple[Fused, dict[str, Any]]:
    """Multi-head latent attention of DeepSeek V2 and V3."""
    watched.add(attention)
    names = {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    only(attention, names)
    low_rank = attention.q_lora_rank is not None
    nope, rope, value = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    if attention.kv_lora_rank % 16:
        raise CannotFuse(f"the kernels take a latent of a multiple of 16 numbers, not {attention.kv_lora_rank}")
    split = vars(attention.kv_b_proj).get("split")
    watched.children.append((vars(attention.kv_b_proj), "split", split))
    if split is None:
        parts_of(attention.kv_b_proj, watched)
    matrices = LatentMatrices(attention.kv_b_proj, attention.num_heads, nope, value)
    watched.kept.append(matrices)
    blocks = None if any(p.is_meta for p in attention.kv_b_proj.parameters()) else matrices.blocks()
    settings = getattr(attention, "settings", None)
    if getattr(settings, "decode_cache", "latent") != "latent":
        raise CannotFuse("its attention decodes on an expanded cache")
    fused = Fused(attention.layer_idx, watched, latent=(attention.kv_lora_rank, rope))
    fused.page_tokens = getattr(settings, "page_size", None) or PAGE_TOKENS
    first = attention.q_a_proj if low_rank else attention.q_proj
    return fused, {
        "hidden": first.in_features,
        "heads": attention.num_heads,
        "nope": nope,
        "rope": rope,
        "latent": attention.kv_lora_rank,
        "value": value,
        "q_rank": attention.q_lora_rank or 0,
        "pairing": _pairing(attention),
        "scale": float(attention.scaling),
        "q_norm": norm_of(attention.q_a_layernorm, attention.q_lora_rank, watched) if low_rank else None,
        "latent_norm": norm_of(attention.kv_a_layernorm, attention.kv_lora_rank, watched),
        "first": bundle(watched, first, attention.kv_a_proj_with_mqa),
        "second": bundle(watched, attention.q_b_proj) if low_rank else None,
        "output": bundle(watched, attention.o_proj),
        "keys": blocks[0].call(attention.num_heads) if blocks else None,
        "values": blocks[1].call(attention.num_heads) if blocks else None,
    }


def _pairing(attention: Any) -> int:
    """How rotary numbers are paired: in halves, as neighbours that come apart, or as neighbours that stay (see layer.h)."""
    if any(cls.__name__ == "DeepseekV2Attention" for cls in type(attention).__mro__):
        return 2
    return int(bool(getattr(attention.config, "rope_interleave", False)))


def _window(attention: Any) -> int:
    """Tokens that a query sees, or 0 for all. Mistral's and Mixtral's classes don't keep it: they pass on their config's."""
    if hasattr(attention, "sliding_window"):
        return int(attention.sliding_window or 0)
    passes_on = any(cls.__name__ in ("MistralAttention", "MixtralAttention") for cls in type(attention).__mro__)
    return int(getattr(attention.config, "sliding_window", None) or 0) if passes_on else 0


def _mlp(mlp: Any, watched: Watched) -> dict[str, Any]:
    watched.add(mlp)
    only(mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"})
    return {
        "activation": _activation(mlp.act_fn),
        "intermediate": mlp.gate_proj.out_features,
        "gate_up": bundle(watched, mlp.gate_proj, mlp.up_proj),
        "down": bundle(watched, mlp.down_proj),
    }


def _activation(module: nn.Module) -> int:
    number = ACTIVATIONS.get(type(module).__name__)
    if number is None:
        raise CannotFuse(f"the kernels have no {type(module).__name__}")
    return number
