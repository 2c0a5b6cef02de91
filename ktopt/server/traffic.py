"""The answers that are under way: how many there may be, what is counted of them, and waiting until there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ktopt.engine.engine import Engine
from ktopt.engine.events import Event, Failed, Finished
from ktopt.engine.request import Refused, Request
from ktopt.server.bridge import Answer, Mailbox
from ktopt.server.errors import ApiError, refused
from ktopt.server.metrics import Metrics
from ktopt.server.settings import Settings
from ktopt.server.writing.common import stopping


class Traffic:
    """Of one server. `closing` refuses new requests."""

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics) -> None:
        self.engine, self.settings, self.metrics = engine, settings, metrics
        self.closing = False
        self._mailbox: Mailbox | None = None
        self._open: set[Answer] = set()
        self._preparing = 0

    def enter(self) -> Slot:
        """Room for a request that has begun; a context, left when the request has been given to an answer or refused. ApiError
        where there is none."""
        if self.closing:
            raise stopping()
        if len(self._open) + self._preparing >= self.settings.max_streams:
            message = f"{self.settings.max_streams} requests are being answered already, which is this server's limit; try again"
            raise ApiError(429, message, code="too_many_requests")
        return Slot(self)

    async def ask(self, requests: list[Request], params: Mapping[str, str]) -> Answer:
        """Give requests to the engine. `params` has the parameter that a refusal's code is about. ApiError where it refuses.

        A grammar takes time to be read, so such a request is given by another thread."""
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        answer = Answer(self._mailbox, self._observe, self.settings.max_unread_bytes)
        try:
            if any(request.grammar for request in requests):
                await asyncio.to_thread(answer.submit, self.engine, requests)
            else:
                answer.submit(self.engine, requests)
        except Refused as error:
            raise refused(error, params) from None
        self._open.add(answer)
        self.metrics.streams.set(len(self._open))
        return answer

    def _observe(self, answer: Answer, event: Event) -> None:
        if isinstance(event, Finished):
            self.metrics.ended(event)
        elif isinstance(event, Failed):
            self.metrics.finished.labels("failed").inc()

    def done(self, answer: Answer) -> None:
        """An answer has been given, or nobody waits for it."""
        self._open.discard(answer)
        self.metrics.streams.set(len(self._open))
        if answer.left:
            self.metrics.left.labels(answer.left).inc()

    async def drained(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those that are here, at most so long; whether none is left."""
        self.closing = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._open or self._preparing:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.05)
        return True


class Slot:
    """A request whose prompt is being made counts, too."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def __enter__(self) -> None:
        self._traffic._preparing += 1

    def __exit__(self, *_: object) -> None:
        self._traffic._preparing -= 1
