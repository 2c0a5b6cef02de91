"""KTransformersLinear: a linear layer whose weight is held in the form that its op computes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ktopt.kernels import cpu
from ktopt.operator import Op, PlacedConfig, operator, option
from ktopt.operators.names import upstream_names
from ktopt.placement import DEVICE_KINDS

NO_CUDA_KERNEL = "quantised CUDA kernels are not in this version"
MARLIN = ("KLinearMarlin", "VLinearMarlin")
OWN_TASKS = "the CPU kernels here divide the work among threads themselves"

Precision = Literal[
    "sym_int4", "asym_int4", "sym_int5", "asym_int5", "sym_int8", "nf3", "nf4", "fp4", "fp6", "fp8", "fp8_e4m3", "fp8_e5m2", "fp16",
    "bf16",
]  # fmt: skip
"""IPEX-LLM's names of low-bit types."""

LINEAR_OPS = (
    Op("KLinearTorch", DEVICE_KINDS, "dequantised once to the plan's dtype, computed by torch"),
    Op(
        "KLinearCPUInfer",
        ("cpu",),
        "computed on the CPU from the weight as its file stores it, GGUF blocks included; as KLinearTorch where the CPU kernels "
        "were not built",
        counterpart="KLinearTorch",
        keeps=cpu.KINDS,
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

    generate_op: str = option("KLinearMarlin", help="op of prefill and of decoding", op=True)
    prefill_op: str = option(
        "KLinearTorch", help="op of prefill in KTransformers; recorded only: generate_op does prefill too in this version", op=True
    )
    num_bits: Literal[4, 8] = option(4, help="KLinearMarlin, VLinearMarlin: bits a weight", read_by=MARLIN)
    group_size: int = option(64, help="KLinearMarlin, VLinearMarlin: weights that share a scale", minimum=1, read_by=MARLIN)
    act_order: bool = option(
        False, help="KLinearMarlin, VLinearMarlin: quantise columns in order of activation size", read_by=MARLIN
    )
    is_k_full: bool = option(True, help="KLinearMarlin, VLinearMarlin: the whole input dimension is on this device", read_by=MARLIN)
    block_size: int = option(
        128, help="KLinearFP8: side of a block of weights that share a scale", minimum=1, read_by=("KLinearFP8",)
    )
    stride: int = option(16, help="KLinearCPUInfer: output rows that a task computes", minimum=1, ignored=OWN_TASKS)
    group_max_len: int = option(
        1024, help="KLinearCPUInfer: tokens that are computed together at most", minimum=1, ignored=OWN_TASKS
    )
    precision: Precision = option("sym_int4", help="KLinearIPEXLLM: how weights are quantised", read_by=("KLinearIPEXLLM",))
    out_device: str | None = option(
        None, help="device of the result", device=True, ignored="the plan itself moves a result to where it is needed"
    )
