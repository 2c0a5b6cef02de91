"""What `load_model(mode="long_context")` settles before a model is loaded: rules, config, and room for its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktopt import config as settings
from ktopt.arguments import config_given
from ktopt.block_rules import check_blocks
from ktopt.compiler import compile
from ktopt.config import long_settings, merged, settle, sink_blocks
from ktopt.long_context.config import found_config
from ktopt.long_context.room import check_room, with_answer
from ktopt.long_context.rules import rules_for
from ktopt.plan import Plan
from ktopt.plan_options import LONG_CONTEXT
from ktopt.source import SourceFile
from ktopt.working_memory import block_settings, prompt_piece


def long_context_plan(
    rules: Plan | SourceFile | str | Path | None,
    model: Any,
    weights: Any,
    config: Any,
    *,
    device: str | None = None,
    longest: int | None = None,
    **options: Any,
) -> Plan:
    """The plan by which a model runs long contexts: of the rules, or where there are none of those that the model has by itself.

    config   a config or its path, which goes before the rules; None takes one that lies where configs are looked for, after them
    device   where modules go that nothing places
    longest  the longest prompt, which goes before all that says max_seq_len

    KtoptError where no attention keeps its cache in blocks, or where a full cache has no room.
    """
    given = config_given(config) if config is not None else found_config()
    if rules is None:
        device = device or (given.model.device if given is not None and given.model.device else "cpu")
        rules = rules_for(model, device)
    if isinstance(rules, Plan):
        plan = with_config(rules, given)
    else:
        more = {"device": device} if device is not None else {}
        plan = compile(rules, model, weights=weights, config=given, mode=LONG_CONTEXT, **more, **options)
    if longest is not None:
        plan = replace(plan, long_context={**plan.long_context, "max_seq_len": _holding(plan.long_context, longest)})
    check_blocks(plan)
    long, kvc2 = block_settings(plan)
    check_room(plan, with_answer(replace(long, chunk_size=prompt_piece(plan) or long.chunk_size)), kvc2)
    return plan


def with_config(plan: Plan, config: settings.Config | None) -> Plan:
    """A plan that is made already, with a config's sections."""
    sections = merged(config, {"long_context": plan.long_context, "kvc2": plan.kvc2})
    return replace(plan, long_context=sections["long_context"], kvc2=sections["kvc2"])


def _holding(written: Mapping[str, Any], longest: int) -> int:
    """The max_seq_len of a cache for prompts of so many tokens, which also holds what it always keeps."""
    long = settle(long_settings({**written, "max_seq_len": longest}))
    chosen = long.preselect_block_count * long.block_size if long.preselect_block else 0
    return max(longest, sink_blocks(long.block_size) * long.block_size + long.local_windows_len + chosen)
