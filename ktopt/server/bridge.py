"""From an engine's thread to the event loop: the events of all requests go through one mailbox, so that a step which writes a token
for each of many requests wakes the loop once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from ktopt.engine.engine import Engine, Ticket
from ktopt.engine.events import Event, Failed, Finished, Piece
from ktopt.engine.request import Request
from ktopt.server.writing.usage import usage_of


class Mailbox:
    """Events on their way to the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[tuple[Answer, int, Event]] = deque()
        self._called = False

    def put(self, answer: Answer, prompt: int, event: Event) -> None:
        """Hand an event over, from any thread."""
        self._events.append((answer, prompt, event))
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # before the events are taken: one that comes now calls again
        while self._events:
            answer, prompt, event = self._events.popleft()
            answer.receive(prompt, event)


class Answer:
    """The events of what was asked at once, one request for each prompt, as the loop gets them.

    over            whether nothing more will come
    left            why nobody waits for it any more, or ""
    unread_bytes    of text that nobody has taken yet; with more than `most_unread_bytes` the reader is given up
    """

    def __init__(self, mailbox: Mailbox, observe: Callable[[Answer, Event], None], most_unread_bytes: int) -> None:
        self._mailbox, self._observe, self._most_unread_bytes = mailbox, observe, most_unread_bytes
        self._events: list[tuple[int, Event]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._open = 0
        self.tickets: list[Ticket] = []
        self.finished: list[tuple[int, Finished]] = []
        self.over = False
        self.failed = False
        self.left = ""
        self.unread_bytes = 0

    def submit(self, engine: Engine, requests: list[Request]) -> None:
        """Ask the engine. Refused where it doesn't take one of the requests; the others are then cancelled."""
        self._open = sum(request.n for request in requests)
        try:
            for prompt, request in enumerate(requests):
                self.tickets.append(engine.submit(request, self._to_mailbox(prompt)))
        except BaseException:
            self.cancel()
            raise

    def _to_mailbox(self, prompt: int) -> Callable[[Event], None]:
        return lambda event: self._mailbox.put(self, prompt, event)

    def receive(self, prompt: int, event: Event) -> None:
        """Take an event over from the mailbox, in the loop."""
        self._observe(self, event)
        if isinstance(event, Piece):
            self.unread_bytes += len(event.text) + 64 * len(event.logprobs or ())
            if self.unread_bytes > self._most_unread_bytes:
                self.leave("slow reader")
        elif isinstance(event, Finished):
            self.finished.append((prompt, event))
            self._open -= 1
            self.over = self.over or self._open <= 0
        elif isinstance(event, Failed):
            self.over = self.failed = True
            self.cancel()
        else:
            return
        if not self.left:
            self._events.append((prompt, event))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def events(self, timeout_s: float | None = None) -> list[tuple[int, Event]]:
        """What has come since the last call, by prompt: at least one event, or none where it is over or left, or none came for
        `timeout_s`."""
        if not self._events and not self.over and not self.left:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake) if timeout_s is not None else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        taken, self._events, self.unread_bytes = self._events, [], 0
        return taken

    def told(self) -> dict[str, Any]:
        """What the log has of it."""
        made: dict[str, Any] = {"id": self.tickets[0].id if self.tickets else ""}
        if self.finished:
            made |= {"finish": [event.reason for _, event in self.finished], **usage_of(self.finished)}
            made["cached_tokens"] = made.pop("prompt_tokens_details")["cached_tokens"]
        if self.failed:
            made["failed"] = True
        if self.left:
            made["left"] = self.left
        return made

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to take."""
        return bool(self.left) or (self.over and not self._events)

    def cancel(self) -> None:
        """End its requests at the engine."""
        for ticket in self.tickets:
            ticket.cancel()

    def leave(self, why: str) -> None:
        """Nobody waits for it any more: its requests end, and what they still say isn't kept."""
        if not self.left and not self.ended:
            self.left = why
            self._events, self.unread_bytes = [], 0
            self.cancel()
            self._wake()
