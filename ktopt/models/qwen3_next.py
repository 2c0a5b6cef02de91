"""Qwen3-Next. The copy had one rotary embedding per model, as today; its router was a Linear and its experts a ModuleList."""

from __future__ import annotations

from ktopt.models.family import LINEAR, Family, Was, common, same

FAMILY = Family(
    model_type="qwen3_next",
    package="ktransformers.models.modeling_qwen3_next",
    was={
        **common("Qwen3Next"),
        **same("Qwen3NextSparseMoeBlock", "Qwen3NextGatedDeltaNet", "Qwen3NextRMSNormGated", "Qwen3NextRotaryEmbedding"),
        "Qwen3NextTopKRouter": Was(classes=(LINEAR,)),
    },
)
