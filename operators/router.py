"""The routers (gates) of MoE layers."""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.operator import PlacedConfig, operator, option
from ktopt.operators.linear import LINEAR_OPS
from ktopt.operators.names import upstream_names


@operator(
    "KMoEGate",
    aliases=upstream_names("gate", "KMoEGate"),
    roles=("router",),
    summary="places the router, its weight and its correction bias",
    upstream="loaded weight and correction bias to the device and called the router's own forward",
)
@dataclass(frozen=True, kw_only=True)
class RouterConfig(PlacedConfig):
    """kwargs of KMoEGate."""


NOT_QUANTISED = "the router's own forward runs; a quantised router is not in this version"
QWEN_OPS = {op.name: op for op in LINEAR_OPS}


@operator(
    "KMoEGateQwen2Moe",
    aliases=upstream_names("gate", "KMoEGateQwen2Moe"),
    roles=("router",),
    ops=QWEN_OPS,
    summary="places the router",
    upstream="computed the logits in float32, or with `use_quant` by a quantised linear, and chose experts by grouped top-k",
    forward_changed=True,
    reason="transformers' router computes the same scores and top-k; a quantised router is not in this version",
)
@dataclass(frozen=True, kw_only=True)
class QwenRouterConfig(PlacedConfig):
    """kwargs of KMoEGateQwen2Moe."""

    generate_op: str = option("KLinearMarlin", help="op of prefill and of decoding under use_quant", op=True, ignored=NOT_QUANTISED)
    prefill_op: str = option("KLinearMarlin", help="op of prefill under use_quant", op=True, ignored=NOT_QUANTISED)
    use_quant: bool = option(
        False, help="compute the logits on a quantised weight", ignored_when=lambda on: NOT_QUANTISED if on else ""
    )
