"""GLM-4.5 and GLM-4.5-Air. KTransformers' copy already had one rotary embedding per model and a router class."""

from __future__ import annotations

from ktopt.models.family import Family, common, same

FAMILY = Family(
    model_type="glm4_moe",
    package="ktransformers.models.modeling_glm4_moe",
    was={**common("Glm4Moe"), **same("Glm4MoeMoE", "Glm4MoeTopkRouter", "Glm4MoeRotaryEmbedding")},
)
