"""What attention keeps of a context and what a decoded token reads of it, by module: of a cache that grows, of a sliding window,
and of blocks, which are in main memory while a card has what it attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ktopt.cache.blocks.memory import (
    KIND_OF,
    CacheBytes,
    LayerShape,
    block_layout,
    cache_bytes,
    layer_shapes,
    middle_blocks,
    tiers,
)
from ktopt.config import QUANTISED, LongContextSettings, sink_blocks
from ktopt.diagnostics import KtoptError
from ktopt.placement import device_kind
from ktopt.plan import Plan, Step
from ktopt.working_memory import attention_working, block_settings, keeps_blocks, layer_number


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes of one module's cache.

    held    on its device
    host    in main memory, where its device is another
    read    by a decoded token, on its device
    """

    held: int = 0
    host: int = 0
    read: int = 0


@dataclass(frozen=True, slots=True)
class Caches:
    """Of each attention module by path; and what a card holds for a moment of a cache of blocks, whichever layers it has."""

    costs: dict[str, CacheCost]
    moment_bytes: int = 0


def caches_of(plan: Plan, device: str, context: int, piece: int) -> Caches:
    """The caches of a plan whose attention is all on one device, for a context of which so many tokens are computed at a time.
    KtoptError for a cache of blocks that has no room by its own settings."""
    steps = [step._replace(generate_device=device) for step in plan.steps if step.role == "attention"]
    blocked = [step for step in steps if keeps_blocks(step)]
    found = _blocked(plan, blocked, device_kind(device), context, piece) if blocked else Caches({})
    windows = _windows(plan)
    for step in steps:
        if step.path not in found.costs:
            seen = min(context, windows[number] or context) if (number := layer_number(step.path)) < len(windows) else context
            held, read = (attention_working(plan, step, *tokens).cache_bytes for tokens in ((context, piece), (seen, 1)))
            found.costs[step.path] = CacheCost(held, 0, min(held, read))
    return found


def _windows(plan: Plan) -> list[int | None]:
    """Of each layer the tokens that a query sees, None for all; nothing where the config doesn't tell."""
    try:
        return [shape.window if shape is not None else None for shape in layer_shapes(plan.model.config)]
    except KtoptError:
        return []


def _blocked(plan: Plan, steps: Sequence[Step], kind: str, context: int, piece: int) -> Caches:
    long, kvc2 = block_settings(plan, max_seq_len=context, chunk_size=piece)
    shapes, kept = layer_shapes(plan.model.config), list[LayerShape]()
    costs, before = dict[str, CacheCost](), CacheBytes()
    for step in steps:
        shape = shapes[layer_number(step.path)]
        if shape is None:
            costs[step.path] = CacheCost()
            continue
        dense = sum(each.window is None for each in kept) < long.dense_layer_num
        kept.append(shape)
        now = cache_bytes(kept, long, context)
        own = CacheBytes(**{f.name: getattr(now, f.name) - getattr(before, f.name) for f in fields(CacheBytes)})
        near = own.windows + own.anchors + own.queries
        read = own.anchors + attended_bytes(shape, long, context, dense, packed=kind == "cpu")
        if kind == "cpu":
            costs[step.path] = CacheCost(near + own.index + own.blocks, 0, read)
        else:
            costs[step.path] = CacheCost(near + own.copies * kvc2.gpu_only, own.index + own.blocks, read)
        before = now
    where = tiers(before, kvc2, kind=kind)
    if where.disk:  # what main memory may not take of the blocks
        share = 1 - where.disk / before.blocks
        costs = {path: _less(cost, share, kind) for path, cost in costs.items()}
    return Caches(costs, before.staging)


def _less(cost: CacheCost, share: float, kind: str) -> CacheCost:
    if kind == "cpu":
        return CacheCost(int(cost.held * share), 0, cost.read)
    return CacheCost(cost.held, int(cost.host * share), cost.read)


def attended_bytes(shape: LayerShape, long: LongContextSettings, context: int, dense: bool, *, packed: bool) -> int:
    """What a token reads of a layer's keys and values: the sink, the window and the chosen blocks, or all of them of a layer that
    chooses none. `packed` where blocks are read as they are kept, and not from copies in 16 bits."""
    kind = "F16" if (long.kv_type or "Q8_0") in QUANTISED else KIND_OF[str(long.kv_type)]
    token = shape.token_bytes(kind)
    if shape.window is not None:
        return min(context, shape.window) * token
    middle = middle_blocks(long, context)
    chosen = middle if dense else min(middle, long.second_select_num)
    near = min(context, sink_blocks(long.block_size) * long.block_size + long.local_windows_len + long.block_size)
    block = shape.rows * block_layout(shape, long).nbytes if packed else long.block_size * token
    return near * token + chosen * block
