"""The MoE blocks: router, routed experts and shared experts of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.operator import PlacedConfig, operator
from ktopt.operators.names import upstream_names


@dataclass(frozen=True, kw_only=True)
class MoeConfig(PlacedConfig):
    """kwargs of the MoE blocks."""


REASON = (
    "transformers' block calls experts(hidden_states, top_k_index, top_k_weights) once a layer, which is the call that upstream's "
    "forward was written to make; shared experts and routing are the same computation"
)
OVERLAP = "handed a decoded token's routed experts to the CPU first and computed the shared experts on the GPU meanwhile"
SERVE = "the same for the batching server: took and passed on the number of tokens in use"

BLOCKS = {
    "KDeepseekV2MoE": OVERLAP,
    "KDeepseekV3MoE": OVERLAP,
    "KDeepseekV3MoEV2": SERVE,
    "KQwen2MoeSparseMoeBlock": OVERLAP + "; called the experts module once instead of looping over experts",
    "KQwen2MoeSparseMoeBlockV2": SERVE,
    "KQwen3MoeSparseMoeBlock": "called the experts module once instead of looping over experts",
    "KQwen3MoeSparseMoeBlockV2": SERVE,
    "KQwen3NextSparseMoeBlockV2": SERVE,
    "KMistralSparseMoEBlock": "called the experts module once instead of looping over experts",
    "KGlm4MoeMoE": SERVE,
    "KSmallthinkerMoeBlock": SERVE,
}

FAMILIES = {
    "KDeepseekV2": ("deepseek_v2", "deepseek_v3"),
    "KDeepseekV3": ("deepseek_v3", "deepseek_v2"),
    "KQwen2Moe": ("qwen2_moe",),
    "KQwen3Moe": ("qwen3_moe",),
    "KQwen3Next": ("qwen3_next",),
    "KMistral": ("mixtral",),
    "KGlm4": ("glm4_moe",),
    "KSmallthinker": ("smallthinker",),
}
"""The model types that they were written for, by how their names begin."""

for _name, _upstream in BLOCKS.items():
    operator(
        _name,
        aliases=upstream_names("experts", _name),
        roles=("moe",),
        summary="places the block; transformers' own forward calls the experts module",
        upstream=_upstream,
        forward_changed=True,
        reason=REASON,
        families=next(families for begin, families in FAMILIES.items() if _name.startswith(begin)),
    )(MoeConfig)
