"""Whether a cache of blocks has room, reckoned before any work: in memory, and on disk in the worst case."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from ktopt.cache.blocks.folders import folder_at
from ktopt.cache.blocks.memory import CacheBytes, cache_bytes, disk_share, in_words, layer_shapes, tiers
from ktopt.config import CacheSettings, LongContextSettings, settle
from ktopt.diagnostics import KtoptError
from ktopt.placement import device_kind
from ktopt.plan import Plan
from ktopt.working_memory import keeps_blocks, layer_number


def with_answer(long: LongContextSettings) -> LongContextSettings:
    """The settings of a cache that holds an answer beside the longest prompt, in whole blocks."""
    return settle(replace(long, max_seq_len=long.max_seq_len + long.max_new_tokens))


def full_cache(plan: Plan, long: LongContextSettings) -> CacheBytes:
    """What a plan's cache of blocks takes when it is full."""
    shapes = layer_shapes(plan.model.config)
    kept = [shapes[layer_number(step.path)] for step in plan.steps if keeps_blocks(step)]
    return cache_bytes([shape for shape in kept if shape is not None], long, long.max_seq_len)


def device_of(plan: Plan) -> str:
    """Where a plan's cache of blocks is: on one device. KtoptError where its layers are on several."""
    devices = dict.fromkeys(step.generate_device for step in plan.steps if keeps_blocks(step))
    if len(devices) != 1:
        raise KtoptError(
            f"layers whose cache is in blocks are on one device in this version, and these are on {', '.join(devices)}: place them "
            "on one, or map one onto the other (--remap)"
        )
    return next(iter(devices))


def check_room(plan: Plan, long: LongContextSettings, kvc2: CacheSettings) -> None:
    """KtoptError, with the numbers and what to change, where a full cache fits neither memory nor disk, or nothing can be
    written there."""
    where = tiers(full_cache(plan, long), kvc2, kind=device_kind(device_of(plan)))
    if where.disk or kvc2.prefix_reuse:
        _check_disk(where.disk, kvc2, long)


def _check_disk(worst: int, kvc2: CacheSettings, long: LongContextSettings) -> None:
    folder = folder_at(str(kvc2.disk_path))
    there = next((place for place in (folder, *folder.absolute().parents) if os.path.exists(place)), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise KtoptError(f"`disk_path: {kvc2.disk_path}`: {there} is no folder that can be written to: choose another")
    free = shutil.disk_usage(there).free
    share = disk_share(kvc2)
    allowed = free if share is None else min(free, share)
    if worst > allowed:
        half = "half of " if kvc2.prefix_reuse else ""
        limit = "are free there" if allowed == free else f"it may take ({half}`disk_size_GB`)"
        raise KtoptError(
            f"`disk_path: {kvc2.disk_path}`: a cache of {long.max_seq_len} tokens may put {in_words(worst)} there, and "
            f"{in_words(allowed)} {limit}: raise `cpu_memory_size_GB`, choose another folder, or a smaller `kv_type` or "
            "`max_seq_len`"
        )
