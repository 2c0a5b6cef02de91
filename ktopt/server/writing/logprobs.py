"""Log probabilities as OpenAI's two endpoints give them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ktopt.engine.events import TokenLogprob

LEAST = -9999.0
"""What OpenAI gives for a token that has no probability at all: JSON has no infinities."""

BytesOf = Callable[[int], bytes]


def chat_logprobs(found: Sequence[TokenLogprob], bytes_of: BytesOf) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat's choice."""
    return [
        {**_token(one.token_id, one.logprob, bytes_of), "top_logprobs": [_token(*other, bytes_of) for other in one.top]}
        for one in found
    ]


def _token(token: int, logprob: float, bytes_of: BytesOf) -> dict[str, Any]:
    raw = bytes_of(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


class CompletionLogprobs:
    """`logprobs` of a completion's choice, whose text begins at character `offset`."""

    def __init__(self, bytes_of: BytesOf, offset: int) -> None:
        self._bytes_of, self._offset = bytes_of, offset

    def of(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Of these tokens; a later call goes on where this one ended."""
        made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in found:
            text = self._text(one.token_id)
            made["tokens"].append(text)
            made["token_logprobs"].append(_finite(one.logprob))
            made["top_logprobs"].append({self._text(token): _finite(logprob) for token, logprob in one.top})
            made["text_offset"].append(self._offset)
            self._offset += len(text)
        return made

    def _text(self, token: int) -> str:
        return self._bytes_of(token).decode("utf-8", "replace")


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several of what CompletionLogprobs gives, one after the other."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [item for part in parts for item in part[key]] for key in keys}
