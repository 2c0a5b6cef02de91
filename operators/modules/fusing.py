"""A decoder layer's children as the CPU kernels take them, or why they can't: for KDecoderLayer.

Only layers whose forward is known are taken (LAYERS in operators/layer.py): what a child computes is read from its class and its
attributes, and anything unforeseen is a reason to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ktopt.kernels import cpu

ACTIVATIONS = {"SiLUActivation": 0, "SiLU": 0, "GELUTanh": 1, "ReLU": 2}
"""The kernels' numbers of the activations that they have."""


@dataclass(eq=False)
class Fused:
    """A layer that the kernels can run: `run` takes what _cpu.run_layer does after the layer.

    index            the layer's number in the cache
    kv_heads, head_dim, window   its cache's shape; window 0 for none
    stands           whether the children are still those that it was made of, and without hooks
    """

    index: int
    kv_heads: int
    head_dim: int
    window: int
    run: Callable[..., None]
    watched: Watched

    def stands(self) -> bool:
        return self.watched.stands()


@dataclass(eq=False)
class Watched:
    """What a fused layer was made of: children and parameters by identity, and whether hooks have come. It keeps them alive."""

    children: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)
    hooks: list[Mapping[int, Any]] = field(default_factory=list)
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def add(self, parent: nn.Module) -> None:
        """Watch a module's children and parameters, and the children's hooks."""
        for held in (parent._modules, parent._parameters):
            self.children += [(held, name, child) for name, child in held.items()]
        for child in parent._modules.values():
            if child is None:
                continue
            if "forward" in vars(child):
                raise CannotFuse(f"a forward of its own was set on a {type(child).__name__}")
            self.children.append((vars(child), "forward", None))
            self.hooks += [child._forward_hooks, child._forward_pre_hooks]

    def stands(self) -> bool:
        for held, name, child in self.children:
            if held.get(name) is not child:
                return False
        for tensor, version in self.versions:
            if tensor._version != version:
                return False
        return not any(self.hooks) or not self.calls_back()

    def calls_back(self) -> bool:
        """Whether a child has a hook that matters now: transformers' own only do while outputs of attention are asked for."""
        for hooks in self.hooks:
            if any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks.values()):
                return True
        from transformers.utils.output_capturing import _active_collector

        asked = _active_collector.get()
        return bool(asked) and any(key != "hidden_states" and not key.startswith("_") for key in asked)


class CannotFuse(Exception):
    """Why a layer can't be run as one."""


def describe(layer: Any) -> Fused | str:
    """The layer for the kernels, or why it can't be. On the meta device, before weights are there, only the reasons count."""
    watched = Watched()
    try:
        description = _layer(layer, watched)
        if watched.hooks and any(watched.hooks) and watched.calls_back():
            return "a part of it has a hook"
        return _made(layer, description, watched)
    except CannotFuse as reason:
        return str(reason)


def _made(layer: Any, description: dict[str, Any], watched: Watched) -> Fused:
    attention = layer.self_attn
    run: Callable[..., None] = lambda *call: None  # noqa: E731
    if not any(parameter.is_meta for parameter in layer.parameters()) and _complete(description):
        run = cpu.layer_runner(description)
    return Fused(attention.layer_idx, description["kv_heads"], description["head_dim"], description["window"], run, watched)


def _complete(description: dict[str, Any]) -> bool:
    return all(description[name] for name in ("qkv", "output", "gate_up", "down"))


def _layer(layer: Any, watched: Watched) -> dict[str, Any]:
    watched.add(layer)
    norms = {name for name in layer._modules if name.endswith("layernorm")}
    _only(layer, {"self_attn", "mlp"} | norms)
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
    made = {
        "before_attention": _norm(layer.input_layernorm, watched),
        "after_attention": _norm(getattr(layer, after_attention), watched) if after_attention else None,
        "before_mlp": _norm(getattr(layer, before_mlp), watched),
        "after_mlp": _norm(getattr(layer, after_mlp), watched) if after_mlp else None,
    }
    return {**made, **_attention(layer.self_attn, watched), **_mlp(layer.mlp, watched)}


def _attention(attention: Any, watched: Watched) -> dict[str, Any]:
    watched.add(attention)
    _only(attention, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
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
    return {
        "hidden": attention.q_proj.in_features,
        "heads": attention.q_proj.out_features // dim,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "rotary_dim": dim,
        "window": _window(attention),
        "scale": float(attention.scaling),
        "q_norm": _norm(attention.q_norm, watched) if "q_norm" in attention._modules else None,
        "k_norm": _norm(attention.k_norm, watched) if "k_norm" in attention._modules else None,
        "qkv": bundle(watched, attention.q_proj, attention.k_proj, attention.v_proj),
        "output": bundle(watched, attention.o_proj),
    }


def _window(attention: Any) -> int:
    """Tokens that a query sees, or 0 for all. Classes that don't keep it pass on their config's."""
    held = attention.sliding_window if hasattr(attention, "sliding_window") else getattr(attention.config, "sliding_window", None)
    return int(held or 0)


def _mlp(mlp: Any, watched: Watched) -> dict[str, Any]:
    watched.add(mlp)
    _only(mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"})
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


def _only(module: nn.Module, known: set[str]) -> None:
    others = [f"{name} ({type(child).__name__})" for name, child in module._modules.items() if name not in known]
    if others:
        raise CannotFuse(f"{type(module).__name__} holds {', '.join(others)}")


def _norm(norm: Any, watched: Watched) -> tuple[int, float]:
    """The address of a norm's weight as float32, and its epsilon."""
    name = type(norm).__name__
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not name.endswith("RMSNorm") or eps is None or set(norm._parameters) != {"weight"}:
        raise CannotFuse(f"the kernels have no {name}")
    watched.children.append((norm._parameters, "weight", norm.weight))
    _on_cpu(norm.weight, name)
    if norm.weight.is_meta:
        return 0, float(eps)
    weight = norm.weight.detach()
    if "Gemma" in name:  # which multiplies by one more than the weight
        weight = weight.float() + 1.0
    weight = weight.float().contiguous()
    if weight.data_ptr() != norm.weight.data_ptr():
        watched.versions.append((norm.weight, norm.weight._version))
    watched.kept.append(weight)
    return weight.data_ptr(), float(eps)


def bundle(watched: Watched, *linears: Any) -> list[tuple[int, ...]]:
    """The matrices of linears that multiply the same input, one below the other, as _cpu.layer takes them; none on meta."""
    made: list[tuple[int, ...]] = []
    at = 0
    for linear in linears:
        if not isinstance(linear, nn.Linear):
            raise CannotFuse(f"{type(linear).__name__} is no linear layer that the kernels know")
        parts = _parts(linear, watched)
        bias = _bias(linear, watched)
        for first, part in parts:
            made.append((*part.call, at + first, bias + 4 * first if bias else 0))
            watched.kept.append(part)
        at += linear.out_features
    return made


def _parts(linear: Any, watched: Watched) -> list[tuple[int, cpu.Blocks]]:
    watched.children += [(linear._parameters, name, parameter) for name, parameter in linear._parameters.items()]
    stored = linear.__dict__.get("parts")
    if stored:
        return list(stored)
    if type(linear).forward is not nn.Linear.forward and "parts" not in linear.__dict__ and not hasattr(linear, "fusable"):
        raise CannotFuse(f"{type(linear).__name__} computes in its own way")
    weight = linear._parameters.get("weight")
    if weight is None:
        raise CannotFuse(f"{type(linear).__name__} has no weight of its own")
    _on_cpu(weight, type(linear).__name__)
    if weight.is_meta:
        return []
    blocks = cpu.tensor_blocks(weight) if weight.is_contiguous() else None
    if blocks is None:
        raise CannotFuse(f"the kernels can't take a weight of {weight.dtype}")
    return [(0, blocks)]


def _bias(linear: Any, watched: Watched) -> int:
    """The address of a linear's bias as float32, 0 where it has none."""
    if linear.bias is None or linear.bias.is_meta:
        return 0
    bias = linear.bias.detach().float().contiguous()
    if bias.data_ptr() != linear.bias.data_ptr():
        watched.versions.append((linear.bias, linear.bias._version))
    watched.kept.append(bias)
    return int(bias.data_ptr())


def _on_cpu(tensor: torch.Tensor, name: str) -> None:
    if tensor.device.type not in ("cpu", "meta"):
        raise CannotFuse(f"{name} is on {tensor.device}")
