"""Asking the engine: an answer is shown as it comes, and Ctrl-C ends it early."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ktopt.chat.conversation import Turn
from ktopt.diagnostics import KtoptError
from ktopt.engine.events import Failed, Finished, Piece, Reading

if TYPE_CHECKING:
    from ktopt.chat.display import Display
    from ktopt.engine.engine import Engine, Ticket
    from ktopt.engine.events import Event
    from ktopt.engine.request import Request

PATIENCE = 3
"""Ctrl-C so many times ends the program where the engine doesn't stop an answer."""


def answer(engine: Engine, request: Request, question: str, display: Display, opening: str = "") -> Turn:
    """The answer to a request, shown on `display` on its way; its `opening` the prompt has already. Ctrl-C cancels it, and what has
    come by then is the answer. KtoptError where the engine refuses the request or fails."""
    events: queue.Queue[Event] = queue.Queue()
    text: list[str] = []
    with _Interrupts.caught() as interrupts:
        ticket = engine.submit(request, events.put)
        interrupts.stop(ticket)
        try:
            while not isinstance(event := _next(events, display), Finished):
                match event:
                    case Failed(message=message):
                        raise KtoptError(f"the answer failed: {message}")
                    case Reading(read_tokens=done, prompt_tokens=total):
                        display.reading(done, total)
                    case Piece(text=piece):
                        piece = piece if text else opening + piece
                        text.append(piece)
                        display.add(piece)
        finally:
            ticket.cancel()  # of one that is over: nothing
            display.close()
    return Turn(question, "".join(text), event.reason, event.usage, event.timings)


def _next(events: queue.Queue[Event], display: Display) -> Event:
    """The next event; what `display` holds back meanwhile is shown when it is due."""
    while True:
        try:
            return events.get(timeout=display.catch_up())
        except queue.Empty:
            continue


class _Interrupts:
    """What Ctrl-C does during an answer: it cancels it; the third ends the program."""

    def __init__(self) -> None:
        self._count = 0
        self._ticket: Ticket | None = None

    def stop(self, ticket: Ticket) -> None:
        """Cancel this from now on; at once where Ctrl-C has come already."""
        self._ticket = ticket
        if self._count:
            ticket.cancel()

    def _handle(self, number: int, frame: Any) -> None:
        self._count += 1
        if self._count >= PATIENCE:
            raise SystemExit(130)
        if self._ticket is not None:
            self._ticket.cancel()

    @classmethod
    @contextmanager
    def caught(cls) -> Iterator[_Interrupts]:
        """Signals go to the main thread alone, so elsewhere there are none to catch."""
        made = cls()
        if threading.current_thread() is not threading.main_thread():
            yield made
            return
        before = signal.signal(signal.SIGINT, made._handle)
        try:
            yield made
        finally:
            signal.signal(signal.SIGINT, before)
