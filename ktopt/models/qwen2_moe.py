"""Qwen2-57B-A14B and Qwen1.5-MoE. The copy's router was a Linear, and each layer had its own rotary embedding."""

from __future__ import annotations

from ktopt.models.family import LINEAR, Family, Was, common, same

FAMILY = Family(
    model_type="qwen2_moe",
    package="ktransformers.models.modeling_qwen2_moe",
    was={
        **common("Qwen2Moe", attention=("FlashAttention2", "SdpaAttention")),
        **same("Qwen2MoeSparseMoeBlock"),
        "Qwen2MoeTopKRouter": Was(classes=(LINEAR,)),
        "Qwen2MoeRotaryEmbedding": Was(classes=("Qwen2MoeRotaryEmbedding",), per_layer="self_attn.rotary_emb"),
    },
)
