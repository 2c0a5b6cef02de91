"""What a plan takes while it runs on a context of so many tokens: weights, cache and the most that is held for a moment, by device.

An operator says what it takes (`OperatorSpec.working`). Latent attention that no operator replaces is transformers' own, which
expands the whole context; beside attention, a piece of the prompt passes the layers as hidden states and as the MLP's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktopt.graph import ITEM_BYTES
from ktopt.operator import build_config
from ktopt.placement import Working, device_kind
from ktopt.plan import Plan, Step
from ktopt.plan_diff import device_bytes
from ktopt.registry import find

HIDDEN_COPIES = 4
"""Hidden states that a layer holds at once: its input, normed, the residual sum, and its result."""
MLP_COPIES = 3
"""Gate, up, and their product."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device."""

    device: str
    weight_bytes: int
    cache_bytes: int
    transient_bytes: int

    @property
    def together(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.transient_bytes


def prompt_piece(plan: Plan) -> int | None:
    """Tokens of a prompt that pass the model at a time: the least chunk_size of its attention and its layers, else that of
    `long_context`; None for the whole prompt."""
    sizes = [step.kwargs.get("chunk_size") for step in plan.steps if step.role == "layer" or _spec_working(step) is not None]
    return min((size for size in sizes if isinstance(size, int)), default=plan.long_context.get("chunk_size"))


def working_memory(plan: Plan, context: int, chunk_size: int | None = None) -> list[DeviceMemory]:
    """What each device holds when the last piece of a context of so many tokens is computed, one sequence. `chunk_size` stands for
    what the plan says."""
    piece = min(context, chunk_size or prompt_piece(plan) or context)
    weights, held = device_bytes(plan), dict[str, Working]()
    for step in plan.steps:
        if step.role != "attention":
            continue
        device, found = step.generate_device, _working(plan, step, context, piece)
        before = held.get(device, Working())
        transient = max(before.transient_bytes, found.transient_bytes)
        held[device] = Working(before.cache_bytes + found.cache_bytes, transient)
    passing = _passing_bytes(plan.model.config, piece, ITEM_BYTES[plan.dtype]) + piece * context  # the mask, a byte each
    return [
        DeviceMemory(
            device,
            weights.get(device, 0),
            held.get(device, Working()).cache_bytes,
            held[device].transient_bytes + passing if device in held else 0,
        )
        for device in sorted({*weights, *held})
    ]


def fitting_chunk(plan: Plan, context: int, limits: Mapping[str, int]) -> int | None:
    """The largest chunk_size, a power of two, with which every device holds no more than its limit; None where none does."""
    sizes = (1 << power for power in range(min(context.bit_length(), 16), 3, -1))
    return next((size for size in sizes if not over_limits(working_memory(plan, context, size), limits)), None)


def over_limits(memory: list[DeviceMemory], limits: Mapping[str, int]) -> list[DeviceMemory]:
    """Devices that hold more than their limit."""
    return [each for each in memory if limits.get(each.device) and each.together > limits[each.device]]


def _spec_working(step: Step) -> Any:
    spec = find(step.operator)
    return spec.working if spec is not None else None


def _working(plan: Plan, step: Step, context: int, piece: int) -> Working:
    spec = find(step.operator)
    config: Mapping[str, Any] = plan.model.config
    item = ITEM_BYTES[step.dtype]
    if spec is not None and spec.working is not None:
        built, _ = build_config(spec, {**step.kwargs, "chunk_size": piece})
        return spec.working(config, built or spec.config(), item, context, piece, device_kind(step.generate_device))
    heads, head = config.get("num_attention_heads"), config.get("head_dim")
    if isinstance(config.get("kv_lora_rank"), int):  # transformers' own latent attention expands all of the context
        nope, rope, value = (int(config[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        latents = context * (int(config["kv_lora_rank"]) + rope) * item
        expanded = context * int(heads or 0) * (nope + value + nope + rope) * item
        return Working(latents, expanded + piece * int(heads or 0) * (2 * (nope + rope) + value) * item)
    kv_heads = int(config.get("num_key_value_heads") or heads or 0)
    dim = int(head or int(config.get("hidden_size") or 0) // max(1, int(heads or 1)))
    return Working(2 * context * kv_heads * dim * item, piece * int(heads or 0) * dim * 3 * item)


def _passing_bytes(config: Mapping[str, Any], piece: int, item: int) -> int:
    hidden, inner = int(config.get("hidden_size") or 0), int(config.get("intermediate_size") or 0)
    return piece * (HIDDEN_COPIES * hidden + MLP_COPIES * inner) * item
