"""KTransformersLinear: a linear layer whose weight is held in the form that its op computes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ktopt.graph import ITEM_BYTES, Module
from ktopt.kernels import cpu
from ktopt.operator import Op, OperatorConfig, PlacedConfig, Problem, dense_footprint, op_on, operator, option
from ktopt.operators.names import upstream_names
from ktopt.placement import DEVICE_KINDS, Footprint

MARLIN = ("KLinearMarlin", "VLinearMarlin")
OWN_ORDER = "columns keep their order: without calibration nothing tells how large activations are"
ROW_SCALES = "torch's scaled product takes one scale for each output, not for blocks of them"
WHOLE = "the input dimension is always whole here"
INT4_GROUPS = (32, 64, 128, 256)
ROUNDED_AT_A_TIME = 1 << 22
"""Weights that are made into few bits at a time."""
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
        "4 bits a weight with a scale and a zero for each group, by torch's int4 product; with num_bits 8, as KLinearQ8. Quantised "
        "at load on the device, computed in bfloat16",
        counterpart="KLinearCPUInfer",
        least_sm=80,
        packs=True,
        formerly=("QuantizedLinearMarlin",),
    ),
    Op(
        "VLinearMarlin",
        ("cuda",),
        "as KLinearMarlin, for batches of any size",
        counterpart="KLinearCPUInfer",
        least_sm=80,
        packs=True,
    ),
    Op(
        "KLinearFP8",
        ("cuda",),
        "8-bit floats (e4m3) with a scale for each output, times activations in e4m3 with a scale for each token, by torch's "
        "scaled product; quantised at load on the device",
        counterpart="KLinearTorch",
        least_sm=89,
    ),
    Op(
        "KLinearQ8",
        ("cuda",),
        "8-bit integers with one scale an output, by torch's int8 product for few tokens, and dequantised at each call for many; "
        "quantised at load on the device",
        counterpart="KLinearTorch",
        least_sm=80,
    ),
    Op(
        "KLinearIPEXLLM",
        ("xpu",),
        "low-bit kernels of IPEX-LLM",
        counterpart="KLinearTorch",
        needs="IPEX-LLM's kernels are not in this version",
    ),
)


def low_bits(module: Module, config: Any) -> str:
    """The op, of those that hold weights in 4 or 8 bits, that runs on a module under this config; "" for any other."""
    asked = config.spec.ops.get(getattr(config, "generate_op", ""))
    if asked is None or module.role == "router" or not config.generate_device:
        return ""
    op, _ = op_on(config.spec, asked, config.generate_device)
    return op.name if op.least_sm else ""


def low_bit_footprint(module: Module, config: OperatorConfig, dtype: str) -> Footprint:
    """Bytes of a linear layer: its weight as its op packs it, or else in `dtype`."""
    dense, op = dense_footprint(module, config, dtype), low_bits(module, config)
    weight = next((t for t in module.tensors if t.name == "weight" and len(t.shape) == 2), None)
    if not op or weight is None:
        return dense
    rest = dense.weight_bytes - weight.numel * ITEM_BYTES[dtype]
    return Footprint(weight_bytes=rest + packed_bytes(weight.shape, op, config))


def loading_low_bits(module: Module, config: OperatorConfig, dtype: str) -> int:
    """While a weight is packed: it as numbers, and twice a byte for each; and what some of its rows take while they are rounded."""
    weight = next((t for t in module.tensors if t.name == "weight" and len(t.shape) == 2), None)
    if not low_bits(module, config) or weight is None:
        return 0
    return making_low_bits(weight.numel, dtype)


def making_low_bits(numel: int, dtype: str) -> int:
    """Bytes held at most while a matrix of so many weights is packed, itself included."""
    return numel * (ITEM_BYTES[dtype] + 2) + min(numel, ROUNDED_AT_A_TIME) * 3 * ITEM_BYTES["float32"]


def packed_bytes(shape: tuple[int, ...], op: str, config: Any) -> int:
    """Bytes of a matrix (outputs, inputs) as operators/modules/low_bit.py holds it."""
    rows, columns = shape
    wide_rows = padded(rows, 16)
    if op in ("KLinearFP8", "KLinearQ8") or getattr(config, "num_bits", 4) == 8:
        return wide_rows * padded(columns, 16) + (4 if op == "KLinearFP8" else 2) * wide_rows
    group = getattr(config, "group_size", 64)
    wide_columns = padded(columns, max(128, group))
    return wide_rows * wide_columns // 2 + wide_rows * (wide_columns // group) * 4


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@operator(
    "KTransformersLinear",
    aliases=upstream_names("linear", "KTransformersLinear"),
    roles=("linear", "router"),
    implementation="ktopt.operators.modules.linear:KTransformersLinear",
    ops={op.name: op for op in LINEAR_OPS},
    summary="a linear layer computed by the op that the rule names; a router keeps its own forward",
    upstream="held one op for prefill and one for decoding, and loaded the weight into the one in use",
    forward_changed=True,
    footprint=low_bit_footprint,
    loading=loading_low_bits,
)
@dataclass(frozen=True, kw_only=True)
class LinearConfig(PlacedConfig):
    """kwargs of KTransformersLinear. The kernel options below matter to the ops that they name, and to no other."""

    generate_op: str = option("KLinearMarlin", help="op of prefill and of decoding", op=True)
    prefill_op: str = option(
        "KLinearTorch", help="op of prefill in KTransformers; recorded only: generate_op does prefill too in this version", op=True
    )
    num_bits: Literal[4, 8] = option(4, help="KLinearMarlin, VLinearMarlin: bits a weight", read_by=MARLIN)
    group_size: int = option(
        64,
        help="KLinearMarlin, VLinearMarlin: weights that share a scale, with 4 bits: 32, 64, 128 or 256",
        minimum=1,
        read_by=MARLIN,
    )
    act_order: bool = option(
        False,
        help="KLinearMarlin, VLinearMarlin: quantise columns in order of activation size",
        read_by=MARLIN,
        ignored_when=lambda asked: OWN_ORDER if asked else "",
    )
    is_k_full: bool = option(
        True,
        help="KLinearMarlin, VLinearMarlin: the whole input dimension is on this device",
        read_by=MARLIN,
        ignored_when=lambda asked: "" if asked else WHOLE,
    )
    block_size: int = option(
        128,
        help="KLinearFP8: side of a block of weights that share a scale",
        minimum=1,
        read_by=("KLinearFP8",),
        ignored_when=lambda size: "" if size == 128 else ROW_SCALES,
    )
    stride: int = option(16, help="KLinearCPUInfer: output rows that a task computes", minimum=1, ignored=OWN_TASKS)
    group_max_len: int = option(
        1024, help="KLinearCPUInfer: tokens that are computed together at most", minimum=1, ignored=OWN_TASKS
    )
    precision: Precision = option("sym_int4", help="KLinearIPEXLLM: how weights are quantised", read_by=("KLinearIPEXLLM",))
    out_device: str | None = option(
        None, help="device of the result", device=True, ignored="the plan itself moves a result to where it is needed"
    )

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> list[Problem]:
        size = given.get("group_size", INT4_GROUPS[0])
        op = given.get("generate_op", cls.__dataclass_fields__["generate_op"].default)
        if op not in MARLIN or given.get("num_bits", 4) == 8 or size in INT4_GROUPS:
            return []
        listed = ", ".join(map(str, INT4_GROUPS[:-1])) + f" or {INT4_GROUPS[-1]}"
        return [Problem("group_size", "value", f"`group_size: {size}`: torch's int4 product takes groups of {listed} weights")]
