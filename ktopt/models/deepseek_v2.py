"""DeepSeek-V2, V2-Lite and Coder-V2."""

from __future__ import annotations

from ktopt.models.family import Family, Was, common

FAMILY = Family(
    model_type="deepseek_v2",
    package="ktransformers.models.modeling_deepseek",
    was={
        **common("DeepseekV2", attention=("FlashAttention2",)),
        "DeepseekV2Moe": Was(classes=("DeepseekV2MoE",)),
        "DeepseekV2TopkRouter": Was(classes=("MoEGate",)),
        "DeepseekV2RotaryEmbedding": Was(
            classes=("DeepseekV2RotaryEmbedding",),
            by_rope={
                "yarn": "DeepseekV2YarnRotaryEmbedding",
                "linear": "DeepseekV2LinearScalingRotaryEmbedding",
                "dynamic": "DeepseekV2DynamicNTKScalingRotaryEmbedding",
            },
            per_layer="self_attn.rotary_emb",
        ),
    },
    only={
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False, None),
        "moe_layer_freq": (1,),
    },
)
