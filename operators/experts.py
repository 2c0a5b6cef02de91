"""KTransformersExperts and its variants: the routed experts of one MoE layer as one module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ktopt.graph import ITEM_BYTES, Module
from ktopt.kernels import cpu
from ktopt.operator import Op, OperatorConfig, PlacedConfig, Problem, dense_footprint, operator, option
from ktopt.operators.hot_experts import cannot_split, hot_problems, split_footprint, split_working
from ktopt.operators.kernel_memory import expert_bytes, rounded, running_op
from ktopt.operators.latent_memory import FLOAT_BYTES
from ktopt.operators.linear import low_bits, making_low_bits, packed_bytes
from ktopt.operators.model_sizes import ModelSizes
from ktopt.operators.names import upstream_names
from ktopt.operators.own_memory import one_by_one
from ktopt.placement import DEVICE_KINDS, Footprint, Running, Working

NO_BACKWARD = "the CPU kernels have no backward pass"
ONE_SET = (
    "the kernels that run are chosen by the types in the weight file and by the CPU: blocks meet activations of 8 bits (by AVX512 "
    "VNNI, AVX512, AVX2 or plain C++), numbers are multiplied as they are"
)

KEXPERTS_MARLIN = Op(
    "KExpertsMarlin",
    ("cuda",),
    "4 bits a weight with a scale and a zero for each 64, by torch's int4 product, expert by expert; quantised at load on the "
    "device, computed in bfloat16",
    counterpart="KExpertsTorch",
    least_sm=80,
    packs=True,
    formerly=("MLPCUDAExperts",),
)
EXPERTS_OPS = (
    Op("KExpertsTorch", DEVICE_KINDS, "dequantised once to the plan's dtype, computed by grouped matrix products"),
    Op(
        "KExpertsCPU",
        ("cpu",),
        "computed on the CPU from the weights as their file stores them, GGUF blocks included, in one call of the CPU kernels; as "
        "KExpertsTorch where those were not built",
        counterpart="KExpertsTorch",
        keeps=tuple(kind for kind in cpu.KINDS if kind not in ("F32", "F16", "BF16")),
        formerly=("MLPCPUExperts",),
    ),
    KEXPERTS_MARLIN,
    Op(
        "KSFTExpertsCPU",
        ("cpu",),
        "KExpertsCPU with a backward pass, for fine-tuning",
        counterpart="KExpertsTorch",
        needs=NO_BACKWARD,
    ),
)
NO_PREFILL_OP = Op("None", DEVICE_KINDS, "no op of its own for prefill: generate_op does both")

Backend = Literal["llamafile", "AMXBF16", "AMXInt8"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(PlacedConfig):
    """kwargs of KTransformersExperts and its variants."""

    generate_op: str = option("KExpertsCPU", help="op of prefill and of decoding", op=True)
    prefill_op: str = option(
        "KExpertsTorch", help="op of prefill in KTransformers; recorded only: generate_op does prefill too in this version", op=True
    )
    out_device: str | None = option(None, help="device of the result; by default the device of the input", device=True)
    backend: Backend = option(
        "llamafile",
        help="KExpertsCPU: kernel that computes on the CPU",
        idle_when=lambda backend: "" if backend == "llamafile" else ONE_SET,
        read_by=("KExpertsCPU", "KSFTExpertsCPU"),
    )
    hot_experts: dict[int, int | str] | str | None = option(
        None,
        help='experts that live on hot_device, as numbers and ranges such as "0..3, 17": of each layer by its number, or the same '
        "of all layers that the rule takes; the others stay on generate_device",
    )
    hot_device: str | None = option(
        None, help="device of the hot experts; by default that of the block which the experts are in", device=True
    )
    hot_op: Literal["KExpertsTorch", "KExpertsMarlin"] = option("KExpertsTorch", help="op of the hot experts")

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> list[Problem]:
        return hot_problems(given)


def cannot_take(module: Module, config: OperatorConfig) -> str | None:
    """Why these experts can't be taken over, or not be split as the config says."""
    return not_gated_and_fused(module) or cannot_split(module, config)


def not_gated_and_fused(module: Module) -> str | None:
    """Why these experts can't be taken over: only gate_up_proj (experts, 2 x intermediate, hidden) and down_proj (experts, hidden,
    intermediate) can, without biases, or a ModuleList of experts, which its block calls one by one."""
    shapes = {tensor.name: tensor.shape for tensor in module.tensors}
    if not shapes:
        return None
    unknown = sorted(set(shapes) - {"gate_up_proj", "down_proj"})
    if unknown or len(shapes) != 2:
        held = ", ".join(sorted(shapes))
        return f"{module.path} ({module.cls.simple_name}) holds {held}; only gate_up_proj and down_proj can be taken over"
    gate_up, down = shapes["gate_up_proj"], shapes["down_proj"]
    if len(gate_up) != 3 or len(down) != 3 or gate_up[1:] != (2 * down[2], down[1]):
        return f"{module.path} ({module.cls.simple_name}) holds its weights transposed: gate_up_proj {gate_up}, down_proj {down}"
    return None


def packed_footprint(module: Module, config: OperatorConfig, dtype: str) -> Footprint:
    """Bytes of a layer's experts: their matrices as KExpertsMarlin packs them where that runs, or else in `dtype`."""
    dense = dense_footprint(module, config, dtype)
    if low_bits(module, config) != KEXPERTS_MARLIN.name:
        return dense
    stacks = [tensor for tensor in module.tensors if len(tensor.shape) == 3]
    packed = sum(t.shape[0] * packed_bytes(t.shape[1:], KEXPERTS_MARLIN.name, config) for t in stacks)
    return Footprint(weight_bytes=dense.weight_bytes - sum(t.numel for t in stacks) * ITEM_BYTES[dtype] + packed)


def experts_working(running: Running) -> Working:
    """Of a layer's experts, beyond their input.

    Grouped products by torch: of each row (a hidden state once for each of its experts) the most is what gate and up make, or what
    down makes while its rows are weighted and put in order. The CPU kernels keep each row's inner layer, rounded to 8 bits where
    weights are in blocks, and make the result in float32.
    """
    sizes, item, rows = ModelSizes.of(running.model), running.item, running.rows
    hidden, inner = sizes.hidden, sizes.expert_inner
    result = rows * hidden * item
    if running_op(running.step) == "KExpertsCPU" and running.step.stored:
        rounding = rounded(hidden) if set(running.step.stored) - {"F32", "F16", "BF16"} else 0
        made = rows * hidden * FLOAT_BYTES + (result if item != FLOAT_BYTES else 0)
        return Working(0, made, rows * rounding + expert_bytes(rows, sizes, running.step.stored))
    if one_by_one(running):
        return Working(0, 3 * rows * (inner + hidden) * item)
    row = max(hidden + 4 * inner, 2 * hidden + 3 * inner, 3 * hidden + 2 * inner)
    return Working(0, result + rows * sizes.chosen * row * item)


def loading_experts(module: Module, config: OperatorConfig, dtype: str) -> int:
    """While they are packed, one matrix after another: all that are packed, and one more. Their numbers are in main memory."""
    if low_bits(module, config) != KEXPERTS_MARLIN.name:
        return 0
    matrices = [t.shape[1] * t.shape[2] for t in module.tensors if len(t.shape) == 3]
    return packed_footprint(module, config, dtype).weight_bytes + max((making_low_bits(n, dtype) for n in matrices), default=0)


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
    upstream_device="cpu",
    forward_changed=True,
    refuses=cannot_take,
    footprint=split_footprint(packed_footprint),
    working=split_working(experts_working),
    loading=loading_experts,
)(ExpertsConfig)

SERVE_VARIANTS = {
    "KTransformersExpertsV2": "the same for the batching server: the number of tokens in use came with each call",
    "KGlm4Experts": "KTransformersExpertsV2 for GLM-4.5; made no op for prefill, whatever prefill_op said",
    "KSmallthinkerExperts": "KTransformersExpertsV2 for SmallThinker; made no op for prefill, whatever prefill_op said",
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
        upstream_device="cpu",
        forward_changed=True,
        refuses=cannot_take,
        footprint=split_footprint(packed_footprint),
        working=split_working(experts_working),
        loading=loading_experts,
    )(ExpertsConfig)
