"""Rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.operator import PlacedConfig, operator
from ktopt.operators.names import upstream_names


@dataclass(frozen=True, kw_only=True)
class RopeConfig(PlacedConfig):
    """kwargs of the rotary embeddings."""


REBUILT = "rebuilt the model's own embedding on its device; the forward stayed the model's"
OWN = "computed cos and sin in float32 from frequencies made on its device, "

ROTARY = {
    "RotaryEmbedding": (REBUILT, False),
    "RotaryEmbeddingV2": (REBUILT, False),
    "RotaryEmbeddingV3": (OWN + "without scaling", True),
    "RotaryEmbeddingV4": (OWN + "without scaling, for the batching server", True),
    "YarnRotaryEmbedding": (REBUILT, False),
    "YarnRotaryEmbeddingV3": (OWN + "scaled as YaRN does", True),
    "DynamicNTKScalingRotaryEmbedding": (REBUILT, False),
    "KQwen3MoeRotaryEmbedding": (REBUILT, False),
    "KSmallthinkerRotaryEmbedding": (REBUILT, False),
    "KGlm4MoeRotaryEmbedding": (REBUILT, False),
}

for _name, (_upstream, _changed) in ROTARY.items():
    operator(
        _name,
        aliases=upstream_names("RoPE", _name),
        roles=("rotary",),
        implementation="ktopt.operators.modules.rope:PlacedRotary",
        summary="transformers' embedding of the model, its frequencies held on each device where layers need them",
        upstream=_upstream,
        forward_changed=_changed,
    )(RopeConfig)
