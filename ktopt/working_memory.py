"""What a plan takes while it runs on a context of so many tokens: weights, cache and the most that is held for a moment, by device.

An operator says what it takes (`OperatorSpec.working`). Latent attention that no operator replaces is transformers' own, which
expands the whole context; beside attention, a piece of the prompt passes the layers as hidden states and as the MLP's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktopt.cache.blocks.memory import GB, cache_bytes, layer_shapes, tiers
from ktopt.config import CacheSettings, LongContextSettings, settled
from ktopt.diagnostics import KtoptError
from ktopt.graph import ITEM_BYTES
from ktopt.operator import build_config, field_types
from ktopt.placement import Working, device_kind
from ktopt.plan import Plan, Step
from ktopt.plan_diff import device_bytes
from ktopt.registry import find

DISK = "disk"
"""The memory's name that holds what of a cache of blocks fits nowhere else."""
HIDDEN_COPIES = 4
"""Hidden states that a layer holds at once: its input, normed, the residual sum, and its result."""
LEAST_CHUNK = 16
"""The least chunk_size that is proposed: smaller ones make a prompt slow and hardly need less."""
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
    `long_context`, which a plan with a cache of blocks always has; None for the whole prompt."""
    otherwise = plan.long_context.get("chunk_size")
    if otherwise is None and any(keeps_blocks(step) for step in plan.steps if step.role == "attention"):
        otherwise = LongContextSettings().chunk_size
    asks = (step for step in plan.steps if step.role == "layer" or keeps_blocks(step) or _spec_working(step) is not None)
    sizes = [step.kwargs.get("chunk_size") for step in asks]
    return min((size for size in sizes if isinstance(size, int)), default=otherwise)


def working_memory(
    plan: Plan, context: int, chunk_size: int | None = None, limits: Mapping[str, int] | None = None
) -> list[DeviceMemory]:
    """What each device holds when the last piece of a context of so many tokens is computed, one sequence.

    chunk_size   stands for what the plan says
    limits       what devices have: a cache of blocks takes what the rest leaves of it, where kvc2 gives no number

    Of a cache of blocks main memory has its part, "cpu", and so has the disk, "disk". KtoptError where such a cache doesn't fit.
    """
    piece = min(context, chunk_size or prompt_piece(plan) or context)
    weights, held, blocked = device_bytes(plan), dict[str, Working](), dict[str, list[Step]]()
    for step in plan.steps:
        if step.role != "attention":
            continue
        if keeps_blocks(step):
            blocked.setdefault(step.generate_device, []).append(step)
            continue
        device, found = step.generate_device, attention_working(plan, step, context, piece, chunk_size)
        before = held.get(device, Working())
        transient = max(before.transient_bytes, found.transient_bytes)
        held[device] = Working(before.cache_bytes + found.cache_bytes, transient)
    passing = passing_bytes(plan, context, piece, mask=not blocked)
    transients = {device: held[device].transient_bytes + passing for device in held} | {
        device: held.get(device, Working()).transient_bytes + passing for device in blocked
    }
    caches = {device: found.cache_bytes for device, found in held.items()}
    if blocked:
        taken = {device: weights.get(device, 0) + caches.get(device, 0) + transients[device] for device in blocked}
        room = {device: max(0, (limits or {})[device] - taken[device]) for device in blocked if (limits or {}).get(device)}
        for device, count in block_bytes(plan, blocked, context, piece, room).items():
            caches[device] = caches.get(device, 0) + count
    return [
        DeviceMemory(device, weights.get(device, 0), caches.get(device, 0), transients.get(device, 0))
        for device in sorted({*weights, *caches}, key=lambda device: (device == DISK, device))
    ]


def keeps_blocks(step: Step) -> bool:
    """Whether a module's operator keeps keys and values in blocks."""
    spec = find(step.operator)
    return spec is not None and spec.blocks


def block_bytes(
    plan: Plan, steps: Mapping[str, Sequence[Step]], context: int, piece: int, room: Mapping[str, int]
) -> dict[str, int]:
    """What a cache of blocks takes in each memory, for the attention on each device. `room` is what devices have for it. Each
    device keeps a cache of its own layers, and main memory is shared out in their order."""
    long, kvc2 = block_settings(plan, max_seq_len=context, chunk_size=piece)
    shapes, found = layer_shapes(plan.model.config), dict[str, int]()
    for device, layers in steps.items():
        kept = [shape for step in layers if (shape := shapes[layer_number(step.path)]) is not None]
        where = tiers(cache_bytes(kept, long, context), kvc2, kind=device_kind(device), device_bytes=room.get(device))
        kvc2 = replace(kvc2, cpu_memory_size_GB=max(0.0, kvc2.cpu_memory_size_GB - where.host / GB))
        for name, count in ((device, where.device), ("cpu", where.host), (DISK, where.disk)):
            if count:
                found[name] = found.get(name, 0) + count
    return found


def block_settings(plan: Plan, **changes: Any) -> tuple[LongContextSettings, CacheSettings]:
    """What a plan's cache of blocks runs by: its attention's own kwargs, else the plan's sections, else defaults; `changes` go
    before all. KtoptError for what can't be."""
    kwargs = next((step.kwargs for step in plan.steps if keeps_blocks(step)), {})
    sections = {
        name: {**getattr(plan, name), **{key: kwargs[key] for key in field_types(cls) if kwargs.get(key) is not None}}
        for name, cls in (("long_context", LongContextSettings), ("kvc2", CacheSettings))
    }
    sections["long_context"] |= changes
    return settled(sections)


def layer_number(path: str) -> int:
    """The first number in a module's path."""
    return next(int(part) for part in path.split(".") if part.isdecimal())


def fitting_chunk(plan: Plan, context: int, limits: Mapping[str, int]) -> int | None:
    """The largest chunk_size, a power of two, with which every device holds no more than its limit; None where none does."""
    sizes = (1 << power for power in range(min(context.bit_length(), 16), LEAST_CHUNK.bit_length() - 2, -1))
    return next((size for size in sizes if _fits(plan, context, size, limits)), None)


def _fits(plan: Plan, context: int, size: int, limits: Mapping[str, int]) -> bool:
    try:
        return not over_limits(working_memory(plan, context, size, limits), limits)
    except KtoptError:  # of a cache of blocks, that it doesn't fit
        return False


def over_limits(memory: list[DeviceMemory], limits: Mapping[str, int]) -> list[DeviceMemory]:
    """Devices that hold more than their limit."""
    return [each for each in memory if limits.get(each.device) and each.together > limits[each.device]]


def _spec_working(step: Step) -> Any:
    spec = find(step.operator)
    return spec.working if spec is not None else None


def attention_working(plan: Plan, step: Step, context: int, piece: int, chunk_size: int | None = None) -> Working:
    """What one attention module holds for a context, and while a piece of the prompt is read."""
    spec = find(step.operator)
    config: Mapping[str, Any] = plan.model.config
    item = ITEM_BYTES[step.dtype]
    if spec is not None and spec.working is not None:
        built, _ = build_config(spec, {**step.kwargs, **({"chunk_size": chunk_size} if chunk_size else {})})
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


def passing_bytes(plan: Plan, context: int, piece: int, *, mask: bool = True) -> int:
    """What a piece of the prompt takes while it passes a layer, beside attention; and its mask, a byte for each pair of tokens."""
    config: Mapping[str, Any] = plan.model.config
    hidden, inner = int(config.get("hidden_size") or 0), int(config.get("intermediate_size") or 0)
    return piece * (HIDDEN_COPIES * hidden + MLP_COPIES * inner) * ITEM_BYTES[plan.dtype] + mask * piece * context
