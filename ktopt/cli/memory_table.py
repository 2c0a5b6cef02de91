"""What a context takes on each device, as a table and in words: `ktopt plan --context`."""

from __future__ import annotations

from textwrap import fill

from ktopt.cli.table import Column, layout
from ktopt.cli.terminal import size
from ktopt.plan import Plan
from ktopt.render.style import PLAIN, Style, plural, printable
from ktopt.working_memory import LEAST_CHUNK, DeviceMemory, fitting_chunk
from ktopt.working_memory.asked import Memory
from ktopt.working_memory.passing import Peak
from ktopt.working_memory.pieces import takes_chunk
from ktopt.working_memory.remedies import group_of

MEMORY_WIDTH = 100
LATENT_ATTENTION = "KDeepseekV2Attention"
MOMENTS = ("prefill", "decode", "loading")
HEADS = (
    Column("device"),
    *(Column(name, right=True) for name in ("weights", "cache", *MOMENTS, "together", "has")),
)
PEAK_HEADS = (Column("most at"), Column("device"), Column("bytes", right=True), Column("module"), Column("operator"))


def memory_table(memory: Memory, style: Style = PLAIN) -> str:
    """What each device holds, at which module the worst moments are, and whether it fits; where not, what would make it."""
    piece, context = memory.chunk_size, memory.context
    read = f"a prompt read {piece:,} tokens at a time (chunk_size)" if piece and piece < context else "a prompt read whole"
    several = f" of each of {memory.batch:,} sequences" if memory.batch > 1 else ""
    parts = [
        f"memory for a context of {context:,} tokens{several}, {read}",
        layout(HEADS, [_row(each, memory) for each in memory.devices], MEMORY_WIDTH, style, least=6),
        layout(PEAK_HEADS, list(_peaks(memory)), MEMORY_WIDTH, style, least=8),
        *_fitting(memory),
    ]
    return "\n\n".join(parts) + "\n"


def _row(each: DeviceMemory, memory: Memory) -> list[str]:
    has = memory.limits.get(each.device)
    moments = (each.prefill, each.decode, each.loading)
    numbers = (each.weight_bytes, each.cache_bytes, *(peak.nbytes for peak in moments), each.together)
    return [each.device, *(size(count) if count else "-" for count in numbers), size(has) if has else "not known"]


def _peaks(memory: Memory) -> list[list[str]]:
    """The modules at which the worst moments are."""
    rows = []
    for name in MOMENTS:
        for each in memory.devices:
            peak: Peak = getattr(each, name)
            if peak.nbytes:
                rows.append([name, each.device, size(peak.nbytes), printable(group_of(peak.module)), peak.operator])
    return rows


def _fitting(memory: Memory) -> list[str]:
    """Which devices hold what they must, and what would help those that don't: a paragraph for each."""
    if not memory.limits:
        return ["what the devices have isn't known: --hardware says whether it fits"]
    fits, piece = fitting_chunk(memory.reckoning, memory.context, memory.limits, memory.batch), memory.chunk_size
    said = []
    for each in memory.devices:
        have = memory.limits.get(each.device)
        if not have:
            continue
        line = f"{each.device} has {size(have)}: "
        if each not in memory.over:
            line += f"it fits, with {size(have - each.together)} to spare"
            line += f", and does with a chunk_size of up to {fits}" if fits and piece and piece < fits < memory.context else ""
        elif fits and takes_chunk(memory.reckoning.plan):
            line += f"{size(each.together - have)} too little; --chunk_size {fits} makes it fit"
        else:
            why = "nothing in the plan reads one" if fits else _why_not(memory, each, have)
            line += f"{size(each.together - have)} too little; no chunk_size makes it fit, since {why}"
        said.append(fill(line, MEMORY_WIDTH, break_long_words=False, break_on_hyphens=False))
    return said


def _why_not(memory: Memory, each: DeviceMemory, have: int) -> str:
    """Why a device is too small for any chunk_size."""
    kept = each.weight_bytes + each.cache_bytes
    if kept > have:
        return f"weights and cache alone take {size(kept)}"
    if each.loading.nbytes > have:
        return f"loading alone takes {size(each.loading.nbytes)}"
    plan: Plan = memory.reckoning.plan
    plain = [step for step in plan.steps if step.role == "attention" and step.operator != LATENT_ATTENTION]
    if plain and isinstance(plan.model.config.get("kv_lora_rank"), int):
        asked = memory.reckoning.memory(memory.context, memory.batch, LEAST_CHUNK)
        least = next(found for found in asked if found.device == each.device)
        return (
            f"{plain[0].path} and {plural(len(plain) - 1, 'other')}, which no {LATENT_ATTENTION} computes, expand keys and values "
            f"of the whole context at once: {size(least.transient_bytes)} even for {LEAST_CHUNK} tokens at a time. "
            f"{LATENT_ATTENTION} multiplies by kv_b_proj instead (absorbed), or expands a tile of the context at a time"
        )
    return "what a piece of the prompt takes grows with the context"
