"""Qwen3-30B-A3B and 235B-A22B. The copy's layers used Qwen2-MoE's rotary embedding, beside the model's own."""

from __future__ import annotations

from ktopt.models import qwen2_moe
from ktopt.models.family import LINEAR, Family, Was, common, same

FAMILY = Family(
    model_type="qwen3_moe",
    package="ktransformers.models.modeling_qwen3_moe",
    was={
        **common("Qwen3Moe"),
        **same("Qwen3MoeSparseMoeBlock"),
        "Qwen3MoeTopKRouter": Was(classes=(LINEAR,)),
        "Qwen3MoeRotaryEmbedding": Was(
            classes=("Qwen3MoeRotaryEmbedding", f"{qwen2_moe.FAMILY.package}.Qwen2MoeRotaryEmbedding"),
            per_layer="self_attn.rotary_emb",
        ),
    },
)
