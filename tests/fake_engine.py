"""An engine without a model, for tests of the server: it says what a test has it say, a token a character."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ktopt.engine.events import Event, Failed, Finished, Piece, Reading, Timings, TokenLogprob, Usage
from ktopt.engine.request import Refused, Request
from ktopt.engine.status import EngineStatus, PageStatus, RequestStatus, Totals

WORDS = 0x110000


class CharacterTokenizer:
    """A token is a character; a chat is written with its roles."""

    eos_token_id = 3

    def __init__(self, chat_template: str | None = None) -> None:
        self.added_tokens_decoder: dict[int, Any] = {}
        self.chat_template = chat_template or PLAIN

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **given: Any) -> str:
        assert not tokenize
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = complain
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        return environment.from_string(self.chat_template).render(messages=messages, **given)


def complain(message: str) -> None:
    raise TemplateError(message)


PLAIN = """\
{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""

Says = Callable[[Request, int], str]


class FakeTicket:
    def __init__(self, id: str) -> None:
        self.id = id
        self.cancelled, self.over = threading.Event(), threading.Event()

    @property
    def done(self) -> bool:
        return self.over.is_set()

    def cancel(self) -> None:
        self.cancelled.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.over.wait(timeout_s)


class FakeEngine:
    """says(request, choice)  the text of a choice
    token_s                   a token takes so long
    """

    backend = "balance_serve"

    def __init__(
        self, says: Says | str = "Hello there", *, context_tokens: int = 4096, token_s: float = 0.0, template: str | None = None
    ) -> None:
        self.tokenizer: Any = CharacterTokenizer(template)
        self.context_tokens = context_tokens
        self.says: Says = (lambda request, choice: says) if isinstance(says, str) else says
        self.token_s = token_s
        self.requests: list[Request] = []
        self.tickets: list[FakeTicket] = []
        self.refuse: Refused | None = None
        self.fail: Failed | None = None
        self.closed = False
        self.cached_tokens = 0

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> FakeTicket:
        if self.refuse is not None:
            raise self.refuse
        if self.closed:
            raise Refused("shutting_down", "the engine is shutting down")
        asked = len(request.prompt_ids) + request.max_tokens
        if asked > self.context_tokens:
            raise Refused("context_length_exceeded", f"{asked} tokens in all; the context is {self.context_tokens}")
        self.requests.append(request)
        ticket = FakeTicket(request.id)
        self.tickets.append(ticket)
        threading.Thread(target=self._run, args=(request, ticket, on_event), daemon=True).start()
        return ticket

    def _run(self, request: Request, ticket: FakeTicket, on_event: Callable[[Event], None]) -> None:
        prompt = len(request.prompt_ids)
        on_event(Reading(prompt, prompt, self.cached_tokens))
        for choice in range(request.n):
            reason, count, stop = "stop", 0, None
            for character in self.says(request, choice):
                if ticket.cancelled.is_set() or ticket.cancelled.wait(self.token_s):
                    reason = "cancelled"
                    break
                if self.fail is not None and count == 2:
                    on_event(self.fail)
                    ticket.over.set()
                    return
                if count == request.max_tokens:
                    reason = "length"
                    break
                if character in request.stop:
                    stop = character
                    break
                count += 1
                on_event(Piece(choice, character, (ord(character),), _logprobs(request, character)))
            usage = Usage(prompt, self.cached_tokens, count)
            on_event(Finished(choice, reason, usage, Timings(0.0, 0.01, 0.01), stop))
        ticket.over.set()

    def stream(self, request: Request) -> Iterator[Event]:
        raise NotImplementedError

    def status(self) -> EngineStatus:
        running = [t for t in self.tickets if not t.done]
        requests = tuple(RequestStatus(t.id, "me", "writing", 10, 0, 10, 1, 20, 0.5) for t in running)
        pages, totals = PageStatus(32, 100, 1, 2, 97), Totals(requests=len(self.requests), refused={"queue_full": 1})
        return EngineStatus(
            backend=self.backend, running=len(running), waiting=0, max_running=16, max_waiting=256, requests=requests, pages=pages,
            context_tokens=self.context_tokens, memory_bytes={"cache": 1 << 20}, prompt_tokens_per_s=1.0, tokens_per_s=2.0,
            totals=totals, uptime_s=1.0, closing=self.closed,
        )  # fmt: skip

    def close(self, drain_s: float = 0.0) -> None:
        self.closed = True
        end = time.monotonic() + drain_s
        for ticket in self.tickets:
            ticket.wait(max(0.0, end - time.monotonic()))
            ticket.cancel()


def _logprobs(request: Request, character: str) -> tuple[TokenLogprob, ...] | None:
    k = request.sampling.logprobs
    if k is None:
        return None
    top = ((ord(character), -0.5), (ord("é"), float("-inf")))
    return (TokenLogprob(ord(character), -0.5, top[:k]),)
