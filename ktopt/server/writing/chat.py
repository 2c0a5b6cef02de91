"""Answers of /v1/chat/completions."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from typing import Any

from ktopt.engine.events import Event, Failed, Finished, Piece
from ktopt.server.tools.formats import MISTRAL, MISTRAL_ARGS, Format
from ktopt.server.tools.reader import CallArguments, CallBegins, CallEnds, CallReader, Content, Delta
from ktopt.server.writing.common import Head, failure, stopping
from ktopt.server.writing.logprobs import BytesOf, chat_logprobs
from ktopt.server.writing.usage import usage_of

_ALPHABET = string.ascii_letters + string.digits
_CHOICE = '{{"index": {}, "delta": {}, "logprobs": {}, "finish_reason": {}}}'


def call_id(form: Format) -> str:
    """A new id for a call; Mistral's templates take those of nine letters and digits alone."""
    count = 9 if form in (MISTRAL, MISTRAL_ARGS) else 24
    random = "".join(secrets.choice(_ALPHABET) for _ in range(count))
    return random if count == 9 else f"call_{random}"


class _Choice:
    """One choice so far."""

    def __init__(self, form: Format | None, prefix: str, opening: str) -> None:
        self.reader = CallReader(form) if form else None
        self.texts = [opening]
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish = ""
        if self.reader and prefix:
            self.reader.feed(prefix)


class ChatWriter:
    """Writes `n` choices.

    form      how the model calls tools, where it may
    prefix    what the prompt already has of a call that is forced
    opening   text that the prompt already has of an answer
    one_call  end an answer after its first call
    named     a forced call of one tool by its name: such an answer ends with "stop", as OpenAI's do
    """

    def __init__(
        self,
        head: Head,
        n: int,
        bytes_of: BytesOf,
        *,
        logprobs: bool = False,
        form: Format | None = None,
        prefix: str = "",
        opening: str = "",
        one_call: bool = False,
        named: bool = False,
    ) -> None:
        self.head, self.bytes_of, self.logprobs = head, bytes_of, logprobs
        self.form, self.one_call, self.named = form, one_call and n == 1, named
        self.choices = [_Choice(form, prefix, opening) for _ in range(n)]
        self.opening, self.enough = opening, False

    def begin(self) -> str:
        first = json.dumps({"role": "assistant", "content": self.opening, "refusal": None})
        return "".join(self.head.chunk(_CHOICE.format(index, first, "null", "null")) for index in range(len(self.choices)))

    def chunks(self, prompt: int, event: Event) -> str:
        if isinstance(event, Piece):
            if self.enough:
                return ""
            choice = self.choices[event.index]
            logprobs = "null"
            if event.logprobs:
                logprobs = json.dumps({"content": chat_logprobs(event.logprobs, self.bytes_of), "refusal": None})
            if choice.reader is None:
                delta = f'{{"content": {json.dumps(event.text)}}}'
                return self.head.chunk(_CHOICE.format(event.index, delta, logprobs, "null"))
            deltas = [json.dumps(delta) for delta in self._deltas(choice, choice.reader.feed(event.text))]
            if not deltas and event.logprobs:
                deltas = ["{}"]
            made = [_CHOICE.format(event.index, delta, "null" if i else logprobs, "null") for i, delta in enumerate(deltas)]
            return "".join(map(self.head.chunk, made))
        if isinstance(event, Finished):
            choice = self.choices[event.index]
            left = self._deltas(choice, choice.reader.end() if choice.reader and not self.enough else [])
            made = [_CHOICE.format(event.index, json.dumps(delta), "null", "null") for delta in left]
            made.append(_CHOICE.format(event.index, "{}", "null", json.dumps(self._finish(choice, event))))
            return "".join(map(self.head.chunk, made))
        if isinstance(event, Failed):
            raise failure(event.message, event.code)
        return ""

    def end(self, finished: Sequence[tuple[int, Finished]]) -> str:
        return self.head.last(finished)

    def add(self, prompt: int, event: Event) -> None:
        if isinstance(event, Piece):
            if self.enough:
                return
            choice = self.choices[event.index]
            if event.logprobs:
                choice.logprobs += chat_logprobs(event.logprobs, self.bytes_of)
            if choice.reader is None:
                choice.texts.append(event.text)
            else:
                self._keep(choice, choice.reader.feed(event.text))
        elif isinstance(event, Finished):
            choice = self.choices[event.index]
            if choice.reader is not None and not self.enough:
                self._keep(choice, choice.reader.end())
            choice.finish = self._finish(choice, event)
        elif isinstance(event, Failed):
            raise failure(event.message, event.code)

    def whole(self, finished: Sequence[tuple[int, Finished]]) -> dict[str, Any]:
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self.choices)]
        return {**self.head.fields, "choices": choices, "usage": usage_of(finished)}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = choice.calls
        logprobs = {"content": choice.logprobs, "refusal": None} if self.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    def _deltas(self, choice: _Choice, found: Sequence[Delta]) -> list[dict[str, Any]]:
        """What was read, as deltas of a stream."""
        assert self.form is not None or not found
        made: list[dict[str, Any]] = []
        for one in found:
            if isinstance(one, Content):
                made.append({"content": one.text})
            elif isinstance(one, CallBegins):
                assert self.form is not None
                choice.calls.append({})
                call = {"index": one.index, "id": call_id(self.form), "type": "function"}
                made.append({"tool_calls": [{**call, "function": {"name": one.name, "arguments": ""}}]})
            elif isinstance(one, CallArguments):
                made.append({"tool_calls": [{"index": one.index, "function": {"arguments": one.text}}]})
            elif self.one_call:
                self.enough = True
                break
        return made

    def _keep(self, choice: _Choice, found: Sequence[Delta]) -> None:
        for one in found:
            if isinstance(one, Content):
                choice.texts.append(one.text)
            elif isinstance(one, CallBegins):
                assert self.form is not None
                function = {"name": one.name, "arguments": ""}
                choice.calls.append({"id": call_id(self.form), "type": "function", "function": function})
            elif isinstance(one, CallArguments):
                choice.calls[-1]["function"]["arguments"] += one.text
            elif isinstance(one, CallEnds) and self.one_call:
                self.enough = True
                break

    def _finish(self, choice: _Choice, event: Finished) -> str:
        if event.reason == "cancelled" and not self.enough:
            raise stopping()
        if event.reason == "length":
            return "length"
        return "tool_calls" if choice.calls and not self.named else "stop"
