"""A request that an engine has taken, from submit to its last event."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ktopt.engine.answers import Answer
from ktopt.engine.engine import OnEvent
from ktopt.engine.events import Event, Failed, Finished, Reading, Reason, Timings, Usage
from ktopt.engine.request import Request
from ktopt.engine.sampling import Choice
from ktopt.engine.status import RequestStatus

log = logging.getLogger(__name__)


class Job:
    """What callers see of it is a Ticket; the rest is for the engine's thread.

    answers        a choice each
    cached_tokens  of the prompt, that a cache had
    read_tokens    of the prompt, that were read or cached
    """

    def __init__(self, request: Request, on_event: OnEvent, answers: list[Answer], wake: Callable[[], None]) -> None:
        self.request, self.answers = request, answers
        self.cached_tokens = self.read_tokens = 0
        self.cancelled = self.failed = False
        self.submitted_s, self.started_s = time.monotonic(), 0.0
        self._on_event, self._wake = on_event, wake
        self._over = threading.Event()

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def cancel(self) -> None:
        self.cancelled = True
        self._wake()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._over.wait(timeout_s)

    def start(self) -> None:
        self.started_s = time.monotonic()

    @property
    def open_answers(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.ended is None]

    def read(self, tokens: int, cached_tokens: int) -> None:
        """So many tokens of the prompt are read, of which some were cached."""
        self.read_tokens, self.cached_tokens = tokens, cached_tokens
        self._say(Reading(tokens, len(self.request.prompt_ids), cached_tokens))

    def take(self, answer: Answer, choice: Choice) -> None:
        """A choice goes on by a token."""
        piece = answer.take(choice)
        if piece is not None:
            self._say(piece)
        if answer.ended is not None:
            self._finish(answer)

    def end_cancelled(self) -> None:
        """End what isn't finished."""
        for answer in self.open_answers:
            answer.ended = "cancelled"
            self._finish(answer)

    def fail(self, message: str, code: str = "internal_error") -> None:
        """End the request with an error."""
        for answer in self.open_answers:
            answer.ended = "cancelled"
        self.failed = True
        self._say(Failed(message, code))
        self._over.set()

    def _finish(self, answer: Answer) -> None:
        reason: Reason = answer.ended or "cancelled"
        usage = Usage(len(self.request.prompt_ids), self.cached_tokens, len(answer.tokens))
        self._say(Finished(answer.index, reason, usage, self._timings(answer), answer.stop))
        if not self.open_answers:
            self._over.set()

    def _timings(self, answer: Answer) -> Timings:
        now = time.monotonic()
        started = self.started_s or now
        first = answer.first_s or now
        return Timings(started - self.submitted_s, max(0.0, first - started), max(0.0, (answer.last_s or first) - first))

    def _say(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            if not self.cancelled:
                log.exception("request %s is cancelled, since who asked for it can't take its events", self.id)
            self.cancelled = True

    def status(self) -> RequestStatus:
        prompt, new = len(self.request.prompt_ids), sum(len(answer.tokens) for answer in self.answers)
        state: Any = "waiting" if not self.started_s else "writing" if new or self.read_tokens == prompt else "reading"
        return RequestStatus(
            self.id, self.client, state, prompt, self.cached_tokens, self.read_tokens, new,
            self.request.max_tokens * self.request.n, time.monotonic() - self.submitted_s,
        )  # fmt: skip
