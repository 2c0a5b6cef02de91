"""A routed MLP's children as the CPU kernels take them: router, experts, and a shared expert. See fusing.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ktopt.kernels import cpu
from ktopt.kernels.cpu.experts import Experts
from ktopt.operators.modules.experts import KTransformersExperts, computes_otherwise
from ktopt.operators.modules.experts_cpu import KExpertsCPU, kernel_activation
from ktopt.operators.modules.watching import CannotFuse, Watched, floats, matrix, only, parts_of

SHARED = ("shared_expert", "shared_experts")
BLOCKS = frozenset({"MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock", "DeepseekV2Moe", "DeepseekV3MoE"})
"""The MoE blocks whose forward the kernels compute."""


def routed(block: Any, watched: Watched) -> dict[str, Any]:
    """A MoE block for _cpu.layer."""
    if type(block).__name__ not in BLOCKS:
        raise CannotFuse(f"the kernels don't know {type(block).__name__}")
    watched.add(block)
    only(block, {"gate", "experts", "shared_expert_gate", *SHARED})
    shared = next((block._modules[name] for name in SHARED if name in block._modules), None)
    if shared is not None and not shared.gate_proj.out_features:
        shared = None  # n_shared_experts: 0
    gated = "shared_expert_gate" in block._modules
    if gated and shared is None:
        raise CannotFuse(f"{type(block).__name__} weights a shared expert that it doesn't have")
    return {
        **_routing(block.gate, watched),
        "gated": gated,
        "router": _products(watched, block.gate, *([block.shared_expert_gate] if gated else [])),
        "experts": _experts(block.experts, shared, watched),
    }


def _routing(gate: Any, watched: Watched) -> dict[str, Any]:
    """How a router chooses, by its class."""
    name = type(gate).__name__
    watched.attributes(gate, "top_k", "norm_topk_prob", "routed_scaling_factor", "num_group", "topk_group", "topk_method")
    plain = {
        "routed": gate.num_experts, "chosen": gate.top_k, "sigmoid": False, "sum_of_two": False,
        "normalize": bool(getattr(gate, "norm_topk_prob", True)), "routed_scale": 1.0, "choice_bias": None, "groups": 1,
        "kept_groups": 1,
    }  # fmt: skip
    if name in ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "MixtralTopKRouter"):
        return plain
    scaled = {**plain, "routed_scale": float(gate.routed_scaling_factor)}
    if name == "DeepseekV3TopkRouter":
        bias = floats(gate._buffers, "e_score_correction_bias", gate.num_experts, watched)
        groups = {"groups": gate.num_group, "kept_groups": gate.topk_group, "sum_of_two": True}
        return {**scaled, **groups, "sigmoid": True, "choice_bias": bias}
    if name == "DeepseekV2TopkRouter" and gate.topk_method in ("greedy", "group_limited_greedy"):
        limited = gate.topk_method == "group_limited_greedy"
        groups = {"groups": gate.num_group, "kept_groups": gate.topk_group} if limited else {}
        return {**scaled, **groups, "normalize": False}
    raise CannotFuse(f"the kernels don't know {name}")


def _products(watched: Watched, *modules: Any) -> list[tuple[int, ...]]:
    """The router's matrix, and below it the shared expert's gate."""
    made: list[tuple[int, ...]] = []
    at = 0
    for module in modules:
        if getattr(module, "bias", None) is not None:
            raise CannotFuse(f"{type(module).__name__} has a bias")
        parts = parts_of(module, watched) if isinstance(module, nn.Linear) else matrix(module, "weight", watched)
        made += [(*part.call, at + first, 0) for first, part in parts]
        watched.kept += parts
        at += module.weight.shape[0]
    return made


def _experts(experts: Any, shared: Any, watched: Watched) -> Any:
    """The kernels' object of all experts; none on meta."""
    if not isinstance(experts, KTransformersExperts) and (reason := computes_otherwise(experts)):
        raise CannotFuse(reason)
    watched.add(experts)
    activation = kernel_activation(experts.act_fn)
    if not activation:
        raise CannotFuse(f"the kernels have no {type(experts.act_fn).__name__}")
    extra = _shared(shared, activation, watched) if shared is not None else ()
    stored = experts.stored if isinstance(experts, KExpertsCPU) else None
    watched.children.append((vars(experts), "stored", stored))
    names = ("gate_up_proj", "down_proj")
    plain = [] if stored else [tuple(part for _, part in matrix(experts, name, watched)) for name in names]
    gate_up, down = (stored.gate_up, stored.down) if stored else plain
    if extra is None or not gate_up:
        return None
    count = experts.down_proj.shape[0] if stored is None else stored.count
    made = Experts(count, gate_up, down, activation, extra)
    watched.kept.append(made)
    return made.object


def _shared(mlp: Any, activation: str, watched: Watched) -> Sequence[cpu.Blocks] | None:
    """Gate, up and down of the shared expert; None on meta."""
    watched.add(mlp)
    only(mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"})
    if kernel_activation(mlp.act_fn) != activation:
        raise CannotFuse("the shared expert has another activation")
    made: list[cpu.Blocks] = []
    for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        if not isinstance(linear, nn.Linear) or linear.bias is not None:
            raise CannotFuse(f"the kernels can't take the shared expert's {type(linear).__name__}")
        parts = parts_of(linear, watched)
        if not parts:
            return None
        if len(parts) > 1:
            raise CannotFuse("the shared expert is stored in pieces")
        made.append(parts[0][1])
    return made
