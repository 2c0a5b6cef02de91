"""What every engine does for its callers, whatever runs behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

from ktopt.engine.events import Event
from ktopt.engine.request import Request
from ktopt.engine.status import EngineStatus

OnEvent = Callable[[Event], None]
"""Called from the engine's thread, in order. It mustn't wait for anything: all requests would wait with it. Where it raises, its
request is cancelled and the log says so."""


class Ticket(Protocol):
    """A request that an engine has taken. Any thread may call."""

    @property
    def id(self) -> str: ...

    @property
    def done(self) -> bool:
        """Whether the last event has been given."""

    def cancel(self) -> None:
        """End it within a step. Each choice that isn't finished then ends as "cancelled"."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, or so long; whether it is."""


class Events(Protocol):
    """A request's events, waited for one by one."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Event: ...

    def close(self) -> None:
        """Cancel the request, if it isn't done."""


class Engine(Protocol):
    """Runs requests in a thread of its own. Any thread may call.

    backend         "ktransformers" (one request at a time), "balance_serve" (many) or "long_context"
    tokenizer       the model's
    context_tokens  a prompt and its answer, at most
    """

    backend: str
    tokenizer: Any
    context_tokens: int

    def submit(self, request: Request, on_event: OnEvent) -> Ticket:
        """Take a request; Refused where it can't be done or not now."""

    def stream(self, request: Request) -> Events:
        """The same, with events as an iterator that waits for them. Refused by this call; closing the iterator cancels."""

    def status(self) -> EngineStatus:
        """What it is doing."""

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, wait at most so long for those that it has, cancel the rest, and end."""
