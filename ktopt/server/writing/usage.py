"""The tokens that an answer took, as OpenAI counts them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ktopt.engine.events import Finished


def usage_of(finished: Iterable[tuple[int, Finished]]) -> dict[str, Any]:
    """`usage` of choices, each with the number of its prompt: a prompt counts once, however many choices it has."""
    prompts: dict[int, tuple[int, int]] = {}
    new = 0
    for prompt, event in finished:
        count, cached = event.usage.prompt_tokens, event.usage.cached_tokens
        prompts[prompt] = (count, min(cached, prompts.get(prompt, (0, cached))[1]))
        new += event.usage.completion_tokens
    read = sum(count for count, _ in prompts.values())
    return {
        "prompt_tokens": read,
        "completion_tokens": new,
        "total_tokens": read + new,
        "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in prompts.values())},
    }
