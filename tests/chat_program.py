"""A chat on the terminal that it is started on, over an engine of no model: tests start it, and type.

It answers a message of digits with so many lines, "long" with an endless text, "escape" with control sequences, and else with what
it was asked. Its tokenizer takes a character for a token.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ktopt.chat.chatting import Chat
from ktopt.chat.commands import COMMANDS
from ktopt.chat.conversation import Conversation, Template
from ktopt.chat.history import open_history
from ktopt.chat.line import TypingLine, keys_wait
from ktopt.chat.loop import run
from ktopt.chat.screen import Screen
from ktopt.cli.terminal import style_of
from ktopt.engine.events import Event, Failed, Finished, Piece, Reading, Timings, Usage
from ktopt.engine.request import Request, Sampling
from ktopt.engine.status import EngineStatus, Totals


class CharacterTokenizer:
    """A token for each character."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        return self("".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>")

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(map(chr, ids))


class FakeTicket:
    id = "1"

    def __init__(self) -> None:
        self.cancelled, self.over = threading.Event(), threading.Event()

    @property
    def done(self) -> bool:
        return self.over.is_set()

    def cancel(self) -> None:
        self.cancelled.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.over.wait(timeout_s)


class FakeEngine:
    """Answers by `text_of` the last message, a piece at a time; keeps its requests."""

    backend = "fake"

    def __init__(self, text_of: Callable[[str], Iterator[str]], context_tokens: int = 100_000, wait_s: float = 0.0) -> None:
        self.tokenizer, self.context_tokens = CharacterTokenizer(), context_tokens
        self.text_of, self.wait_s = text_of, wait_s
        self.requests: list[Request] = []

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> FakeTicket:
        ticket = FakeTicket()
        cached = 0
        if self.requests:
            pairs = zip(self.requests[-1].prompt_ids, request.prompt_ids, strict=False)
            cached = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.requests.append(request)
        threading.Thread(target=self._answer, args=(request, cached, ticket, on_event), daemon=True).start()
        return ticket

    def _answer(self, request: Request, cached: int, ticket: FakeTicket, on_event: Callable[[Event], None]) -> None:
        asked = self.tokenizer.decode(request.prompt_ids)
        question = asked.rpartition("<user>")[2].removesuffix("</><assistant>")
        on_event(Reading(len(request.prompt_ids), len(request.prompt_ids), cached))
        reason, count = "stop", 0
        for piece in self.text_of(question):
            if ticket.cancelled.is_set():
                reason = "cancelled"
                break
            if count >= request.max_tokens:
                reason = "length"
                break
            count += 1
            if piece == "FAIL":
                on_event(Failed("it broke"))
                return
            on_event(Piece(0, piece, (1,)))
            time.sleep(self.wait_s)
        usage = Usage(len(request.prompt_ids), cached, count)
        on_event(Finished(0, reason, usage, Timings(0.0, 0.5, 1.0)))
        ticket.over.set()

    def stream(self, request: Request) -> Iterator[Event]:
        raise NotImplementedError

    def status(self) -> EngineStatus:
        memory = {"cache": 1_000_000}
        return EngineStatus("fake", 0, 0, 1, 1, self.context_tokens, (), None, memory, 0.0, 0.0, Totals(), 1.0, False)

    def close(self, drain_s: float = 0.0) -> None:
        return


def words(question: str) -> Iterator[str]:
    """What the program answers."""
    question = question.rpartition("\n\n")[2]
    if question.isdecimal():
        yield from (f"line {n}\n\n" for n in range(int(question)))
    elif question == "long":
        yield from (f"word{n} " for n in itertools.count())
    elif question == "escape":
        yield "a\x1b[31mred\x1b]0;title\x07 [bold]b[/bold] \x9b1m c\x08\r"
    elif question == "fail":
        yield from ("half ", "FAIL")
    else:
        yield from ("You said: ", f"`{question!r}`")


def chat_over(engine: FakeEngine, screen: Screen, **changes: Any) -> Chat:
    given = {"model": "fake", "max_tokens": 10_000, "sampling": Sampling(), "memory_bytes": lambda: 5_000_000}
    return Chat(engine, Template(engine.tokenizer), Conversation(), screen, **{**given, **changes})


if __name__ == "__main__":
    context = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    made = chat_over(FakeEngine(words, context, wait_s=0.002), Screen(style_of(sys.stdout)))
    typing = TypingLine(open_history()[0], {name: command.does for name, command in COMMANDS.items()})
    made.confirm = typing.confirm
    print("ready", flush=True)
    with keys_wait():
        run(made, typing)
    print("left", flush=True)
