"""KTransformersLinear: a linear layer whose weight is held in the form that its op computes on."""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.operator import Op, PlacedConfig, operator, option
from ktopt.operators.names import upstream_names
from ktopt.placement import DEVICE_KINDS

NO_CUDA_KERNEL = "quantised CUDA kernels are not in this version"

LINEAR_OPS = (
    Op("KLinearTorch", DEVICE_KINDS, "dequantised once to the plan's dtype, computed by torch"),
    Op(
        "KLinearCPUInfer",
        ("cpu",),
        "computed on the CPU from the weight as its file stores it, GGUF blocks included; as KLinearTorch where the CPU kernels "
        "were not built",
        counterpart="KLinearTorch",
    ),
    Op(
        "KLinearMarlin",
        ("cuda",),
        "4-bit (or 8-bit) group-quantised Marlin kernel",
        counterpart="KLinearCPUInfer",
        needs=NO_CUDA_KERNEL,
        packs=True,
        formerly=("QuantizedLinearMarlin",),
    ),
    Op(
        "VLinearMarlin",
        ("cuda",),
        "Marlin kernel for batches of changing size",
        counterpart="KLinearCPUInfer",
        needs=NO_CUDA_KERNEL,
        packs=True,
    ),
    Op(
        "KLinearFP8",
        ("cuda",),
        "8-bit floating point in blocks of 128 x 128",
        counterpart="KLinearTorch",
        needs=NO_CUDA_KERNEL,
    ),
    Op(
        "KLinearQ8",
        ("cuda",),
        "8-bit integers with one scale a column, dequantised at each call",
        counterpart="KLinearTorch",
        needs=NO_CUDA_KERNEL,
    ),
    Op(
        "KLinearIPEXLLM",
        ("xpu",),
        "low-bit kernels of IPEX-LLM",
        counterpart="KLinearTorch",
        needs="IPEX-LLM's kernels are not in this version",
    ),
)


@operator(
    "KTransformersLinear",
    aliases=upstream_names("linear", "KTransformersLinear"),
    roles=("linear", "router"),
    implementation="ktopt.operators.modules.linear:KTransformersLinear",
    ops={op.name: op for op in LINEAR_OPS},
    summary="a linear layer computed by the op that the rule names; a router keeps its own forward",
    upstream="held one op for prefill and one for decoding, and loaded the weight into the one in use",
    forward_changed=True,
)
@dataclass(frozen=True, kw_only=True)
class LinearConfig(PlacedConfig):
    """kwargs of KTransformersLinear. The kernel options below matter to the ops that they name, and to no other."""

    generate_op: str = option("KLinearMarlin", help="op of decoding", op=True)
    prefill_op: str = option("KLinearTorch", help="op of prefill", op=True)
    num_bits: int = option(4, help="KLinearMarlin, VLinearMarlin: bits a weight")
    group_size: int = option(64, help="KLinearMarlin, VLinearMarlin: weights that share a scale")
    act_order: bool = option(False, help="KLinearMarlin, VLinearMarlin: quantise columns in order of activation size")
    is_k_full: bool = option(True, help="KLinearMarlin, VLinearMarlin: the whole input dimension is on this device")
    block_size: int = option(128, help="KLinearFP8: side of a block of weights that share a scale")
    stride: int = option(16, help="KLinearCPUInfer: output rows that a task computes")
    group_max_len: int = option(1024, help="KLinearCPUInfer: tokens that are computed together at most")
    precision: str = option("sym_int4", help="KLinearIPEXLLM: how weights are quantised")
    out_device: str | None = option(
        None, help="device of the result", device=True, ignored="the plan itself moves a result to where it is needed"
    )
