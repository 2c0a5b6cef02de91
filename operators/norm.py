"""RMS norms."""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.operator import PlacedConfig, operator
from ktopt.operators.names import upstream_names


@dataclass(frozen=True, kw_only=True)
class NormConfig(PlacedConfig):
    """kwargs of the norms."""


FUSED = (
    "inside the batching server a FlashInfer kernel that also added the residual and took the number of tokens in use; elsewhere "
    "the model's own arithmetic"
)
REASON = "the arithmetic is the model's own; transformers adds the residual outside of the norm and calls it with a tensor alone"

NORMS = {
    "RMSNorm": FUSED,
    "KQwen2MoeRMSNorm": FUSED,
    "KQwen3MoeRMSNorm": FUSED + "; flattened heads first",
    "KQwen3NextRMSNorm": "torch arithmetic with weight + 1 that could also add the residual",
    "KSmallthinkerRMSNorm": FUSED + "; flattened heads first",
    "KGlm4MoeRMSNorm": FUSED + "; flattened heads first",
    "DeepseekV3RMSNormTorch": "torch arithmetic that could also add the residual",
}

for _name, _upstream in NORMS.items():
    operator(
        _name,
        aliases=upstream_names("layernorm", _name),
        roles=("norm",),
        summary="places the norm",
        upstream=_upstream,
        forward_changed=True,
        reason=REASON,
    )(NormConfig)
