"""What a plan's cache of blocks takes in each memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from ktopt.cache.blocks.memory import GB, CacheBytes, cache_bytes, layer_shapes, tiers
from ktopt.config import CacheSettings, LongContextSettings, settled
from ktopt.operator import field_types
from ktopt.placement import device_kind
from ktopt.plan import Plan, Step
from ktopt.working_memory.pieces import keeps_blocks, layer_number

DISK = "disk"
"""The memory's name that holds what of a cache of blocks fits nowhere else."""


def block_bytes(
    plan: Plan, steps: Mapping[str, Sequence[Step]], context: int, piece: int, room: Mapping[str, int], batch: int = 1
) -> dict[str, int]:
    """What a cache of blocks takes in each memory, for the attention on each device. `room` is what devices have for it. Each
    device keeps a cache of its own layers, and main memory is shared out in their order."""
    long, kvc2 = block_settings(plan, max_seq_len=context, chunk_size=piece)
    shapes, found = layer_shapes(plan.model.config), dict[str, int]()
    for device, layers in steps.items():
        kept = [shape for step in layers if (shape := shapes[layer_number(step.path)]) is not None]
        taken = _times(cache_bytes(kept, long, context), batch)
        where = tiers(taken, kvc2, kind=device_kind(device), device_bytes=room.get(device))
        kvc2 = replace(kvc2, cpu_memory_size_GB=max(0.0, kvc2.cpu_memory_size_GB - where.host / GB))
        for name, count in ((device, where.device), ("cpu", where.host), (DISK, where.disk)):
            if count:
                found[name] = found.get(name, 0) + count
    return found


def _times(cache: CacheBytes, batch: int) -> CacheBytes:
    """Of so many sequences."""
    return CacheBytes(**{f.name: batch * getattr(cache, f.name) for f in fields(cache)})


def block_settings(plan: Plan, **changes: int) -> tuple[LongContextSettings, CacheSettings]:
    """What a plan's cache of blocks runs by: its attention's own kwargs, else the plan's sections, else defaults; `changes` go
    before all. KtoptError for what can't be."""
    kwargs = next((step.kwargs for step in plan.steps if keeps_blocks(step)), {})
    sections = {
        name: {**getattr(plan, name), **{key: kwargs[key] for key in field_types(cls) if kwargs.get(key) is not None}}
        for name, cls in (("long_context", LongContextSettings), ("kvc2", CacheSettings))
    }
    sections["long_context"] |= changes
    return settled(sections)
