"""DeepSeek-V3 and R1; Moonlight and Kimi-K2 have the same architecture."""

from __future__ import annotations

from ktopt.models.family import Family, Was, common, same

FAMILY = Family(
    model_type="deepseek_v3",
    package="ktransformers.models.modeling_deepseek_v3",
    was={
        **common("DeepseekV3", attention=("FlashAttention2",)),
        **same("DeepseekV3MoE"),
        "DeepseekV3TopkRouter": Was(classes=("MoEGate",)),
        "DeepseekV3RotaryEmbedding": Was(
            classes=("DeepseekV3RotaryEmbedding",),
            by_rope={
                "yarn": "DeepseekV3YarnRotaryEmbedding",
                "linear": "DeepseekV3LinearScalingRotaryEmbedding",
                "dynamic": "DeepseekV3DynamicNTKScalingRotaryEmbedding",
            },
            per_layer="self_attn.rotary_emb",
        ),
    },
    only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
)
