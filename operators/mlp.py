"""Dense MLPs, shared experts included."""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.operator import PlacedConfig, operator
from ktopt.operators.names import upstream_names


@dataclass(frozen=True, kw_only=True)
class MlpConfig(PlacedConfig):
    """kwargs of the MLPs."""


UPSTREAM = "passed the batching server's number of tokens in use on to its three linear layers; the arithmetic was the model's own"

for _name in ("kDeepseekV3MLP", "KQwen2MoeMLP", "KSmallthinkerDenseMlpBlock", "KGlm4MoeMLP"):
    operator(
        _name,
        aliases=upstream_names("mlp", _name),
        roles=("mlp",),
        summary="places the MLP; its linear layers are placed and replaced by their own rules",
        upstream=UPSTREAM,
        forward_changed=True,
        reason="the extra argument exists only in upstream's server; the arithmetic is the same",
    )(MlpConfig)
