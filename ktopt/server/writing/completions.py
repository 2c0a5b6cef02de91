"""Answers of /v1/completions. Choice number `prompt * n + index` is choice `index` of a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ktopt.engine.events import Event, Failed, Finished, Piece
from ktopt.server.writing.common import Head, failure, stopping
from ktopt.server.writing.logprobs import BytesOf, CompletionLogprobs, joined
from ktopt.server.writing.usage import usage_of

_CHOICE = '{{"index": {}, "text": {}, "logprobs": {}, "finish_reason": {}}}'


class CompletionWriter:
    """Writes `n` choices of each prompt. `echoed` are the prompts' texts, where answers begin with them."""

    def __init__(self, head: Head, prompts: int, n: int, bytes_of: BytesOf, *, logprobs: bool, echoed: Sequence[str] = ()) -> None:
        self.head, self.n, self.logprobs = head, n, logprobs
        self.echoed = [text for text in echoed for _ in range(n)]
        count = prompts * n
        self._of = [CompletionLogprobs(bytes_of, 0) for _ in range(count)]
        self._texts = [[text] for text in self.echoed] or [[] for _ in range(count)]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._finish = [""] * count
        self.enough = False

    def begin(self) -> str:
        return "".join(
            self.head.chunk(_CHOICE.format(place, json.dumps(text), "null", "null")) for place, text in enumerate(self.echoed)
        )

    def chunks(self, prompt: int, event: Event) -> str:
        if isinstance(event, Piece):
            place = prompt * self.n + event.index
            logprobs = json.dumps(self._of[place].of(event.logprobs)) if event.logprobs else "null"
            return self.head.chunk(_CHOICE.format(place, json.dumps(event.text), logprobs, "null"))
        if isinstance(event, Finished):
            place = prompt * self.n + event.index
            return self.head.chunk(_CHOICE.format(place, '""', "null", json.dumps(_reason(event))))
        if isinstance(event, Failed):
            raise failure(event.message, event.code)
        return ""

    def end(self, finished: Sequence[tuple[int, Finished]]) -> str:
        return self.head.last(finished)

    def add(self, prompt: int, event: Event) -> None:
        if isinstance(event, Piece):
            place = prompt * self.n + event.index
            self._texts[place].append(event.text)
            if event.logprobs:
                self._logprobs[place].append(self._of[place].of(event.logprobs))
        elif isinstance(event, Finished):
            self._finish[prompt * self.n + event.index] = _reason(event)
        elif isinstance(event, Failed):
            raise failure(event.message, event.code)

    def whole(self, finished: Sequence[tuple[int, Finished]]) -> dict[str, Any]:
        choices = [
            {
                "index": place,
                "text": "".join(self._texts[place]),
                "logprobs": joined(self._logprobs[place]) if self.logprobs else None,
                "finish_reason": self._finish[place],
            }
            for place in range(len(self._finish))
        ]
        return {**self.head.fields, "choices": choices, "usage": usage_of(finished)}


def _reason(event: Finished) -> str:
    if event.reason == "cancelled":
        raise stopping()
    return event.reason
