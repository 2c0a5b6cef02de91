"""Why a device can't hold a context, in words: the largest items, and what would help."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ktopt.cache.blocks.memory import in_words
from ktopt.graph import ITEM_BYTES
from ktopt.placement import device_kind
from ktopt.plan import Plan, Step
from ktopt.working_memory.devices import DeviceMemory, Reckoning
from ktopt.working_memory.fitting import fitting_chunk, fitting_context
from ktopt.working_memory.pieces import prompt_piece, takes_chunk

LARGEST = 5
FEWER_BITS = (
    "weights in fewer bits take less: --weights, or --storage Q4_K_M as long as there are none, with KTransformersLinear and "
    "KTransformersExperts, or KLinearMarlin"
)
WORTH_SAYING = 10
"""What is less than one in so many of a device's bytes isn't worth changing."""
LATENT = "KDeepseekV2Attention"


def group_of(path: str) -> str:
    """A module's path without its numbers: "model.layers.*.mlp.experts"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def largest_groups(rows: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Modules' paths without their numbers, with the bytes that all of them have, largest first; of paths and bytes."""
    found: dict[str, int] = {}
    for path, count in rows:
        if count:
            found[group_of(path)] = found.get(group_of(path), 0) + count
    return sorted(found.items(), key=lambda item: -item[1])


def listed(items: Iterable[tuple[str, int]]) -> str:
    """The first few in words."""
    return ", ".join(f"{name} {in_words(count)}" for name, count in list(items)[:LARGEST])


def on_device(plan: Plan, device: str) -> list[tuple[Step, int]]:
    """The rows of what holds weights on a device, and how much."""
    return [(step, held[device]) for step in plan.steps if device in (held := step.held_bytes)]


def largest_items(plan: Plan, memory: DeviceMemory, context: int) -> list[tuple[str, int]]:
    """What a device holds, largest first: weights by group, the cache, and the worst moment."""
    moment = max(memory.prefill, memory.decode, key=lambda peak: peak.nbytes)
    when = "a prompt's piece" if moment is memory.prefill else "a token"
    items = largest_groups((step.path, held) for step, held in on_device(plan, memory.device))
    items += [(f"the cache of {context:,} tokens", memory.cache_bytes)] * bool(memory.cache_bytes)
    items += [(f"{when} passing {group_of(moment.module)}", moment.nbytes)] * bool(moment.nbytes)
    if memory.together == memory.loading.nbytes:
        items.append((f"weights while {group_of(memory.loading.module)} is loaded", memory.loading.nbytes))
    return sorted(items, key=lambda item: -item[1])


def what_helps(
    reckoning: Reckoning,
    memory: DeviceMemory,
    context: int,
    limits: Mapping[str, int],
    batch: int = 1,
    chunk_size: int | None = None,
) -> list[str]:
    """What would make a device hold its part, or hold less; each as a clause."""
    plan, device = reckoning.plan, memory.device
    said = [_context(reckoning, memory, context, limits, batch, chunk_size)]
    piece, fits = chunk_size or prompt_piece(plan), fitting_chunk(reckoning, context, limits, batch)
    if fits and fits < (piece or context):
        takes = takes_chunk(plan)
        said.append(
            f"--chunk_size {fits} makes it fit" if takes
            else f"a prompt in pieces of {fits} fits: KDecoderLayer, {LATENT} and `long_context` have a chunk_size"
        )  # fmt: skip
    if memory.cache_bytes * WORTH_SAYING > memory.together:
        said.append(_cache(plan))
    rows = on_device(plan, device)
    experts = sum(held for step, held in rows if step.role == "experts" or ".experts." in step.path)
    if experts and device_kind(device) != "cpu":
        said.append(f"experts in main memory (`place`) leave {in_words(experts)} to the rest")
    wide = (step for step, held in rows if held and not step.stored and step.role in ("linear", "experts"))
    if any(ITEM_BYTES[step.dtype] > 1 for step in wide):
        said.append(FEWER_BITS)
    if plan.hardware:
        said.append(f"`ktopt place` says where modules go on {plan.hardware}")
    return said


def _context(
    reckoning: Reckoning, memory: DeviceMemory, context: int, limits: Mapping[str, int], batch: int, chunk_size: int | None
) -> str:
    fits = fitting_context(reckoning, context, limits, batch, chunk_size)
    if fits:
        return f"a context of {fits:,} tokens fits (--context {fits})"
    return f"no context fits, since weights alone take {in_words(max(memory.weight_bytes, memory.loading.nbytes))}"


def _cache(plan: Plan) -> str:
    if isinstance(plan.model.config.get("kv_lora_rank"), int):
        return f"latents in 8 bits (`kv_dtype: q8_0` of {LATENT}, on the CPU) take half of the cache's bytes"
    return "keys and values in 8 bits, and on disk, take less: KDynamicAttention with `kv_type` and `kvc2` (--mode long_context)"
