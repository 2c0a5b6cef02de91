"""KTransformersExperts and its variants: the routed experts of one MoE layer as one module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ktopt.operator import Op, PlacedConfig, operator, option
from ktopt.operators.names import upstream_names
from ktopt.placement import DEVICE_KINDS

NO_CPU_KERNEL = "quantised CPU kernels are not in this version"

EXPERTS_OPS = (
    Op("KExpertsTorch", DEVICE_KINDS, "dequantised once to the plan's dtype, computed by grouped matrix products"),
    Op(
        "KExpertsCPU",
        ("cpu",),
        "computed on the CPU from the weights as stored, by the kernel that `backend` names",
        counterpart="KExpertsTorch",
        needs=NO_CPU_KERNEL,
    ),
    Op(
        "KExpertsMarlin",
        ("cuda",),
        "4-bit Marlin kernel for each expert",
        counterpart="KExpertsTorch",
        needs="quantised CUDA kernels are not in this version",
    ),
    Op(
        "KSFTExpertsCPU",
        ("cpu",),
        "KExpertsCPU with a backward pass, for fine-tuning",
        counterpart="KExpertsTorch",
        needs=NO_CPU_KERNEL,
    ),
)
NO_PREFILL_OP = Op("None", DEVICE_KINDS, "no op of its own for prefill: generate_op does both")

Backend = Literal["llamafile", "AMXBF16", "AMXInt8"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(PlacedConfig):
    """kwargs of KTransformersExperts and its variants."""

    generate_op: str = option("KExpertsCPU", help="op of decoding", op=True)
    prefill_op: str = option("KExpertsTorch", help="op of prefill", op=True)
    out_device: str | None = option(None, help="device of the result; by default the device of the input", device=True)
    backend: Backend = option("llamafile", help="KExpertsCPU: kernel that computes on the CPU")


IMPLEMENTATION = "ktopt.operators.modules.experts:KTransformersExperts"
SUMMARY = "the experts of one layer in grouped matrix products, called as experts(hidden_states, top_k_index, top_k_weights)"

operator(
    "KTransformersExperts",
    aliases=upstream_names("experts", "KTransformersExperts"),
    roles=("experts",),
    implementation=IMPLEMENTATION,
    ops={op.name: op for op in EXPERTS_OPS},
    summary=SUMMARY,
    upstream="held one op for prefill and one for decoding; the CPU op ran a layer's experts in a pool of threads beside the GPU",
    forward_changed=True,
)(ExpertsConfig)

SERVE_VARIANTS = {
    "KTransformersExpertsV2": "the same for the batching server: the number of tokens in use came with each call",
    "KGlm4Experts": "KTransformersExpertsV2 for GLM-4.5, whose config names the number of experts otherwise",
    "KSmallthinkerExperts": "KTransformersExpertsV2 for SmallThinker, whose experts use ReLU",
}

for _name, _upstream in SERVE_VARIANTS.items():
    operator(
        _name,
        aliases=upstream_names("experts", _name),
        roles=("experts",),
        implementation=IMPLEMENTATION,
        ops={op.name: op for op in (*EXPERTS_OPS, NO_PREFILL_OP)},
        summary=SUMMARY + '; prefill_op: "None" means that generate_op does prefill too',
        upstream=_upstream,
        forward_changed=True,
    )(ExpertsConfig)
