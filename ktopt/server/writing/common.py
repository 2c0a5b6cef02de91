"""What both endpoints' answers have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from ktopt.engine.events import Event, Finished
from ktopt.server.errors import ApiError
from ktopt.server.writing.usage import usage_of

FINGERPRINT = "ktopt"
DONE = "data: [DONE]\n\n"


class Writer(Protocol):
    """Turns the events of an answer into chunks of a stream, or into one object.

    enough  whether the rest of the answer isn't wanted: it is then cancelled, and has ended well
    """

    enough: bool

    def begin(self) -> str:
        """What a stream begins with."""

    def chunks(self, prompt: int, event: Event) -> str:
        """What an event adds to a stream. ApiError where the answer has failed."""

    def end(self, finished: Sequence[tuple[int, Finished]]) -> str:
        """What a stream ends with."""

    def add(self, prompt: int, event: Event) -> None:
        """Take an event for the whole answer. ApiError where it has failed."""

    def whole(self, finished: Sequence[tuple[int, Finished]]) -> dict[str, Any]:
        """The whole answer."""


class Head:
    """What every chunk of an answer begins with, made once."""

    def __init__(self, kind: str, id: str, created: int, model: str, include_usage: bool) -> None:
        self.fields = {"id": id, "object": kind, "created": created, "model": model, "system_fingerprint": FINGERPRINT}
        self.include_usage = include_usage
        self._begin = "data: " + json.dumps(self.fields)[:-1] + ', "choices": ['
        self._end = '], "usage": null}\n\n' if include_usage else "]}\n\n"

    def chunk(self, choice: str) -> str:
        """A chunk with a choice, given as JSON text."""
        return self._begin + choice + self._end

    def last(self, finished: Sequence[tuple[int, Finished]]) -> str:
        """The chunk with the usage, where it is wanted, and the stream's end."""
        if not self.include_usage:
            return DONE
        return f"{self._begin}], {json.dumps({'usage': usage_of(finished)})[1:]}\n\n{DONE}"


def failure(message: str, code: str) -> ApiError:
    """What an engine's failure of a request is as an answer; its message is for the log, unless it is about the request."""
    if code == "internal_error":
        return ApiError(500, "the model failed on this request; the server's log says why", code=code)
    return ApiError(503 if code == "shutting_down" else 400, message, code=code)


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
