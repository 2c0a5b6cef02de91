"""Model-level operators: upstream's loops over the layers, which moved tensors between devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktopt.operator import OperatorConfig, Problem, operator, option
from ktopt.operators.names import upstream_names
from ktopt.placement import canonical_device

REASON = "transformers' own loop over the layers runs; the plan derives the moves between devices and apply installs them"
SUMMARY = "places the model's own buffers; transfers between layers are derived from the placement"


def layer_wise(threshold: object) -> str:
    if isinstance(threshold, int) and threshold > 0:
        return "layer-wise prefill is not in this version: a long prompt is computed by the whole model at once; write 0"
    return ""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(OperatorConfig):
    """kwargs of the model-level operators."""

    device: str | None = option(None, help="device on which the model starts", device=True)
    generate_device: str | None = option(None, help="device of the weights that the model module itself owns", device=True)
    per_layer_prefill_input_threshold: int = option(
        30000,
        minimum=0,
        help="longest prompt, in tokens, that is not computed layer by layer; 0 turns layer-wise prefill off",
        aliases=("per_layer_prefill_intput_threshold",),
        ignored_when=layer_wise,
    )
    transfer_map: dict[int, str] | None = option(
        None, help="device that hidden states move to before each of these layers; checked against the placement"
    )

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> list[Problem]:
        problems = []
        for layer, device in (given.get("transfer_map") or {}).items():
            try:
                canonical_device(device)
            except ValueError as error:
                problems.append(Problem("transfer_map", "value", f"`transfer_map` of layer {layer}: {error}"))
        return problems


LOOP = "a loop over the layers that moved hidden states by transfer_map, and could load one layer at a time to prefill long prompts"

DEEPSEEK, QWEN = ("deepseek_v2", "deepseek_v3"), ("qwen2_moe", "qwen3_moe", "qwen3_next", "glm4_moe", "smallthinker", "mixtral")

for _name, _families, _upstream in (
    ("KDeepseekV2Model", DEEPSEEK, LOOP),
    ("KQwen2MoeModel", QWEN, LOOP),
    ("KQwen3MoeModel", QWEN, LOOP),
    ("KLlamaModel", ("llama",), LOOP + "; read the long-context settings from its own file and ran prompts in chunks"),
):
    operator(
        _name,
        aliases=upstream_names("models", _name),
        roles=("model",),
        summary=SUMMARY,
        upstream=_upstream,
        forward_changed=True,
        reason=REASON,
        families=_families,
    )(ModelConfig)
