"""Llama 2 and 3, and what shares its code (InternLM2.5, SmolLM2). The copy's layers had rotary embeddings beside the model's."""

from __future__ import annotations

from ktopt.models.family import Family, Was, common

FAMILY = Family(
    model_type="llama",
    package="ktransformers.models.modeling_llama",
    was={
        **common("Llama", attention=("FlashAttention2", "SdpaAttention")),
        "LlamaRotaryEmbedding": Was(classes=("LlamaRotaryEmbedding",), per_layer="self_attn.rotary_emb"),
    },
)
