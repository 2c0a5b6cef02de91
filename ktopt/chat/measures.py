"""What an answer took and a conversation has taken, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ktopt.chat.conversation import Conversation, Turn
from ktopt.render.style import plural, size

if TYPE_CHECKING:
    from ktopt.engine.engine import Engine


UNBOUNDED = 1 << 31
"""The context that an engine has of a model whose config says none."""


def of_context(used: int, context_tokens: int) -> str:
    """ "95 of 8,192 tokens", where a context has an end."""
    return f"{used:,} tokens" if context_tokens >= UNBOUNDED else f"{used:,} of {context_tokens:,} tokens"


def rate(tokens: int, seconds: float) -> str:
    """ "1,204 tokens/s", or "" where there is nothing to tell a speed from."""
    return f"{tokens / seconds:,.1f} tokens/s" if tokens > 0 and seconds > 0 else ""


def context_used(turn: Turn) -> int:
    """The tokens of the context after an answer."""
    return turn.usage.prompt_tokens + turn.usage.completion_tokens


def summary(turn: Turn, context_tokens: int, memory_bytes: int) -> str:
    """A line on one answer: tokens and speed of prefill and decode, tokens that were in the cache, the context, memory."""
    usage, timings = turn.usage, turn.timings
    read = usage.prompt_tokens - usage.cached_tokens
    parts = [
        _with_rate(f"read {plural(read, 'token')}", rate(read, timings.prefill_s))
        + (f", {usage.cached_tokens:,} cached" if usage.cached_tokens else ""),
        _with_rate(f"wrote {usage.completion_tokens:,}", rate(usage.completion_tokens - 1, timings.decode_s)),
        f"context {of_context(context_used(turn), context_tokens)}",
        f"memory {size(memory_bytes)}",
    ]
    return "; ".join(parts)


def _with_rate(text: str, speed: str) -> str:
    return f"{text} ({speed})" if speed else text


def statistics(conversation: Conversation, engine: Engine, memory_bytes: int, tiers: Callable[[], str] | None) -> str:
    """Lines on all of a conversation, and the tiers of its cache where it has some."""
    turns = conversation.turns
    seen = f", of which the model sees the last {len(conversation.seen)}" if conversation.first else ""
    used = context_used(turns[-1]) if turns else 0
    rows = [("turns", f"{len(turns)}{seen}"), ("context", of_context(used, engine.context_tokens))]
    read = sum(turn.usage.prompt_tokens - turn.usage.cached_tokens for turn in turns)
    cached = sum(turn.usage.cached_tokens for turn in turns)
    speed = rate(read, sum(turn.timings.prefill_s for turn in turns))
    rows.append(("read", _with_rate(plural(read, "token"), speed) + f"; {cached:,} more were in the cache"))
    decoded = sum(max(0, turn.usage.completion_tokens - 1) for turn in turns)
    written = plural(sum(turn.usage.completion_tokens for turn in turns), "token")
    rows.append(("written", _with_rate(written, rate(decoded, sum(turn.timings.decode_s for turn in turns)))))
    rows.append(("memory", f"{size(memory_bytes)} beyond the interpreter and its libraries"))
    rows += [(f"in {tier}", size(count)) for tier, count in engine.status().memory_bytes.items()]
    wide = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{wide}}{value}" for name, value in rows]
    if tiers is not None and (table := tiers()):
        lines += ["", table]
    return "\n".join(lines)
