"""What a context takes on each device, as a table and in words: `ktopt plan --context`."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill

from ktopt.cli.table import Column, layout
from ktopt.cli.terminal import size
from ktopt.plan import Plan
from ktopt.render.style import PLAIN, Style, plural
from ktopt.working_memory import LEAST_CHUNK, DeviceMemory, fitting_chunk, over_limits, prompt_piece, working_memory

MEMORY_WIDTH = 100
LATENT_ATTENTION = "KDeepseekV2Attention"


def memory_table(plan: Plan, context: int, style: Style = PLAIN, limits: Mapping[str, int] | None = None) -> str:
    """What each device holds for a context of so many tokens; where that is more than its limit, what would make it fit."""
    piece = prompt_piece(plan)
    read = f"a prompt read {piece:,} tokens at a time (chunk_size)" if piece and piece < context else "a prompt read whole"
    memory = working_memory(plan, context, limits=limits)
    rows = [[m.device, size(m.weight_bytes), size(m.cache_bytes), size(m.transient_bytes), size(m.together)] for m in memory]
    heads = (Column("device"), *(Column(name, right=True) for name in ("weights", "cache", "transient", "together")))
    said = f"memory for a context of {context:,} tokens, {read}\n\n" + layout(heads, rows, 80, style) + "\n"
    return said + _fitting(plan, context, memory, limits) if limits else said


def _fitting(plan: Plan, context: int, memory: list[DeviceMemory], limits: Mapping[str, int]) -> str:
    """Which devices hold what they must, and what would help those that don't: a paragraph for each."""
    over, fits, piece = over_limits(memory, limits), fitting_chunk(plan, context, limits), prompt_piece(plan)
    said = []
    for each in memory:
        have = limits.get(each.device)
        if not have:
            continue
        line = f"{each.device} has {size(have)}: "
        if each not in over:
            line += f"it fits, with {size(have - each.together)} to spare"
            line += f", and does with a chunk_size of up to {fits}" if fits and piece and piece < fits < context else ""
        elif fits:
            line += f"{size(each.together - have)} too little; --chunk_size {fits} makes it fit"
        else:
            line += (
                f"{size(each.together - have)} too little; no chunk_size makes it fit, since {_why_not(plan, context, each, have)}"
            )
        said.append("\n" + fill(line, MEMORY_WIDTH, break_long_words=False, break_on_hyphens=False) + "\n")
    return "".join(said)


def _why_not(plan: Plan, context: int, memory: DeviceMemory, have: int) -> str:
    """Why a device is too small for any chunk_size."""
    kept = memory.weight_bytes + memory.cache_bytes
    if kept > have:
        return f"weights and cache alone take {size(kept)}"
    plain = [step for step in plan.steps if step.role == "attention" and step.operator != LATENT_ATTENTION]
    if plain and isinstance(plan.model.config.get("kv_lora_rank"), int):
        least = next(m for m in working_memory(plan, context, LEAST_CHUNK) if m.device == memory.device)
        return (
            f"{plain[0].path} and {plural(len(plain) - 1, 'other')}, which no {LATENT_ATTENTION} computes, expand keys and values "
            f"of the whole context at once: {size(least.transient_bytes)} even for {LEAST_CHUNK} tokens at a time. "
            f"{LATENT_ATTENTION} multiplies by kv_b_proj instead (absorbed), or expands a tile of the context at a time"
        )
    return "what a piece of the prompt takes grows with the context"
