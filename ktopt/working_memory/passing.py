"""The most that devices hold for a moment while tokens pass a model: at which module, and how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktopt.graph import ITEM_BYTES
from ktopt.placement import Working
from ktopt.plan import Plan
from ktopt.working_memory.parts import RunningModule, blocked, text_config
from ktopt.working_memory.pieces import prompt_piece


@dataclass(frozen=True)
class Peak:
    """Bytes that a device holds at once at the most, and the module that runs then, with its operator."""

    nbytes: int = 0
    module: str = ""
    operator: str = ""


@dataclass(frozen=True)
class Pass:
    """Tokens that pass a model together: the last `tokens` of a context of each of `batch` sequences.

    chunk_size   stands for what the plan says of attention
    """

    batch: int
    tokens: int
    context: int
    chunk_size: int | None = None


def last_piece(plan: Plan, context: int, batch: int = 1, chunk_size: int | None = None) -> Pass:
    """The last piece of a prompt of so many tokens."""
    return Pass(batch, min(context, chunk_size or prompt_piece(plan) or context), context, chunk_size)


def peaks(plan: Plan, parts: Sequence[RunningModule], passed: Pass, before: Pass | None = None) -> dict[str, Peak]:
    """By device, what is held beside weights and cache at the worst moment; what kernels keep from this pass and from one `before`
    it is held all along."""
    found: dict[str, Peak] = {}
    kept: dict[str, int] = {}
    masks = not any(map(blocked, parts))
    for part in parts:
        device, working = part.step.generate_device, working_of(plan, part, passed)
        earlier = working if before is None else working_of(plan, part, before)
        kept[device] = max(kept.get(device, 0), working.kept_bytes, earlier.kept_bytes)
        beside = around(plan, part, passed, masks=masks)
        for where, count in ((device, working.transient_bytes), *working.elsewhere.items()):
            if count + beside > found.get(where, Peak()).nbytes:
                found[where] = Peak(count + beside, part.step.path, part.step.operator)
    return {device: replace(peak, nbytes=peak.nbytes + kept.get(device, 0)) for device, peak in found.items()}


def most_held(plan: Plan, parts: Iterable[RunningModule], passed: Pass) -> int:
    """The most that these modules, which are all on the plan's default device, have it hold for a moment."""
    return peaks(plan, list(parts), passed).get(plan.default_device, Peak()).nbytes


def working_of(plan: Plan, part: RunningModule, passed: Pass) -> Working:
    return part.working(text_config(plan), passed.batch, passed.tokens, passed.context, passed.chunk_size)


def around(plan: Plan, part: RunningModule, passed: Pass, *, masks: bool) -> int:
    """What the model and the layer hold while a module runs: hidden states, the rotation, and where attention wants one, a mask."""
    model, item = text_config(plan), ITEM_BYTES[part.step.dtype]
    states = passed.batch * passed.tokens * int(model.get("hidden_size") or 0) * item
    held = part.around * states + passed.tokens * 2 * rotary_numbers(model) * item
    if masks and 1 < passed.tokens < passed.context:
        held += passed.batch * passed.tokens * passed.context
    return held


def rotary_numbers(model: Mapping[str, Any]) -> int:
    """Numbers of a token's cosine, and as many of its sine."""
    latent = model.get("qk_rope_head_dim") if isinstance(model.get("kv_lora_rank"), int) else None
    heads = int(model.get("num_attention_heads") or 0)
    return int(latent or model.get("head_dim") or int(model.get("hidden_size") or 0) // max(1, heads))
