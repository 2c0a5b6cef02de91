"""What the endpoints share: the engine and its model, the limits, and how a request's parameters become the engine's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache

from ktopt.engine.engine import Engine
from ktopt.engine.request import Request, Sampling
from ktopt.engine.text import token_bytes
from ktopt.server.answering import StreamedAnswer, WaitingResponse, WholeAnswer
from ktopt.server.bridge import Answer
from ktopt.server.errors import ApiError, invalid
from ktopt.server.metrics import Metrics
from ktopt.server.protocol.common import Generation
from ktopt.server.settings import Served, Settings
from ktopt.server.template import Prompts
from ktopt.server.tools.formats import Format
from ktopt.server.tools.reader import form_of
from ktopt.server.traffic import Traffic
from ktopt.server.writing.common import Head, Writer

KNOWN_TOKENS = 1 << 16


class Service:
    """Of one server.

    form    how the model writes calls of tools; None where its template has none, or has them in a form that isn't known
    """

    def __init__(self, engine: Engine, settings: Settings, served: Served) -> None:
        self.engine, self.settings, self.served = engine, settings, served
        self.metrics = Metrics(engine, served.name)
        self.traffic = Traffic(engine, settings, self.metrics)
        most = min(engine.context_tokens, settings.max_prompt_tokens or engine.context_tokens)
        self.prompts = Prompts(engine.tokenizer, settings.template_timeout_s, most)
        call = self.prompts.template.call
        self.form: Format | None = form_of(call) if call else None
        self.bytes_of = lru_cache(KNOWN_TOKENS)(lambda token: token_bytes(engine.tokenizer, token))

    def check_model(self, name: str | None) -> None:
        """ApiError for a name that isn't this server's model's."""
        if name is not None and not self.settings.any_model and name not in self.served.names:
            message = f"The model '{name[:200]}' does not exist; this server has '{self.served.name}'."
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_choices(self, count: int) -> None:
        if count > self.settings.max_choices:
            raise invalid("n", f"{count} choices in all, and this server gives at most {self.settings.max_choices}")

    def max_tokens(self, prompt_tokens: int, asked: int | None, param: str, default: int | None = None) -> int:
        """New tokens at most. ApiError where more are asked for than this server gives, or the prompt is longer than it takes."""
        most, limit, context = self.settings.max_new_tokens, self.settings.max_prompt_tokens, self.engine.context_tokens
        if limit is not None and prompt_tokens > limit:
            message = f"the prompt has {prompt_tokens} tokens, and this server takes at most {limit}"
            raise ApiError(400, message, code="context_length_exceeded")
        if asked is not None:
            if asked > most:
                raise invalid(param, f"{asked} is too large: this server gives at most {most} tokens")
            return asked
        return max(1, min(most, default or most, context - prompt_tokens))

    def sampling(self, request: Generation, logprobs: int | None) -> Sampling:
        """How tokens are chosen, by the request or else by the server's defaults."""
        usual = self.settings.sampled

        def given(name: str) -> float | None:
            value: float | None = getattr(request, name)
            return getattr(usual, name) if value is None else value

        top_k = usual.top_k if request.top_k is None else request.top_k
        return Sampling(
            temperature=given("temperature"),
            top_p=given("top_p"),
            top_k=top_k,
            min_p=request.min_p,
            repetition_penalty=given("repetition_penalty"),
            frequency_penalty=given("frequency_penalty") or 0.0,
            presence_penalty=given("presence_penalty") or 0.0,
            logit_bias=_biases(request.logit_bias),
            seed=None if request.seed is None else request.seed % (1 << 63),
            logprobs=logprobs,
        )

    def head(self, kind: str, id: str, request: Generation) -> Head:
        """What this answer's objects begin with."""
        name = request.model if self.settings.any_model and request.model else self.served.name
        return Head(kind, id, int(time.time()), name, request.include_usage)

    async def answer(self, requests: list[Request], writer: Writer, params: Mapping[str, str], stream: bool) -> WaitingResponse:
        """Ask the engine, and respond with what it says. `params` has the parameter that a refusal's code is about."""
        answer: Answer = await self.traffic.ask(requests, params)
        kind = StreamedAnswer if stream else WholeAnswer
        return kind(answer, writer, self.settings, self.traffic.done)

    def close(self) -> None:
        self.prompts.close()


def _biases(given: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    biases = []
    for token, bias in (given or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise invalid("logit_bias", f"its keys are numbers of tokens, and {token[:40]!r} is none")
        biases.append((int(token), bias))
    return tuple(biases)
