"""Mixtral 8x7B and 8x22B. The copy named the block block_sparse_moe, its router was a Linear and its experts a ModuleList."""

from __future__ import annotations

from ktopt.models.family import LINEAR, Family, Was, common

FAMILY = Family(
    model_type="mixtral",
    package="ktransformers.models.modeling_mixtral",
    was={
        **common("Mixtral", attention=("FlashAttention2", "SdpaAttention")),
        "MixtralSparseMoeBlock": Was(classes=("MixtralSparseMoeBlock",), name="block_sparse_moe"),
        "MixtralTopKRouter": Was(classes=(LINEAR,)),
        "MixtralRotaryEmbedding": Was(classes=("MixtralRotaryEmbedding",), per_layer="self_attn.rotary_emb"),
    },
)
