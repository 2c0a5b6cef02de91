"""What an engine is asked: tokens of a prompt, how the next ones are chosen, and where an answer ends."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ktopt.diagnostics import KtoptError

Code = Literal[
    "invalid_request", "context_length_exceeded", "no_room", "queue_full", "shutting_down", "invalid_schema", "unsupported"
]
RETRY: tuple[Code, ...] = ("queue_full", "shutting_down")
"""Refusals that the same request may not meet later."""
MOST_LOGPROBS = 20
MOST_CHOICES = 128
MOST_STOPS = 64
LONGEST_STOP = 1024


class Refused(KtoptError):
    """A request that an engine doesn't take. `code` says why to a program, `numbers` with what, `retry` whether the same request
    may be taken later."""

    def __init__(self, code: Code, message: str, **numbers: int) -> None:
        super().__init__(message)
        self.code, self.numbers, self.retry = code, numbers, code in RETRY


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen of a model's logits. What is None is as the model's generation config has it.

    temperature          0: the likeliest token. By default 0 where the generation config doesn't sample
    top_p, top_k, min_p  as transformers has them; top_k 0 and top_p 1 are no bound
    repetition_penalty   over prompt and answer, as transformers has it; a logit divided by less than 0.01 may be no number any more
    frequency_penalty,
    presence_penalty     over the answer, as OpenAI has them
    logit_bias           (token, what is added to its logit)
    seed                 the same seed, settings and prompt give the same answer. Choice i of several has seed + i
    logprobs             None: none; k: the log probability of each token and of the k likeliest in its place, as the model has
                         them, before anything here changes them
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must be: any JSON object; JSON of a schema (`text`, as JSON); a text that a regex matches; or one of a grammar
    in llguidance's Lark."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and what is wanted of it.

    max_tokens    new tokens of a choice, at most
    n             choices: answers that are made of one prompt
    stop          texts that end an answer, and aren't in it
    stop_ids      tokens that do, beside the model's own end tokens
    ignore_eos    those of the model don't
    keep_special  special tokens are text too
    client        whom the request is from: engines are fair between clients
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    keep_special: bool = False
    grammar: GrammarSpec | None = None
    client: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


def check_request(request: Request, words: int, context_tokens: int) -> None:
    """Refused where a model of so many words and such a context can't do what is asked."""
    count = len(request.prompt_ids)
    _need(count > 0, "the prompt is empty: it has no tokens")
    _need(request.max_tokens >= 1, f"max_tokens must be at least 1, not {request.max_tokens}")
    _need(1 <= request.n <= MOST_CHOICES, f"n must be from 1 to {MOST_CHOICES}, not {request.n}")
    _need(all(request.stop), "a stop text can't be empty")
    long = max(map(len, request.stop), default=0)
    _need(len(request.stop) <= MOST_STOPS, f"there may be {MOST_STOPS} stop texts, and here are {len(request.stop)}")
    _need(long <= LONGEST_STOP, f"a stop text may have {LONGEST_STOP} characters, and one has {long}")
    if (asked := count + request.max_tokens) > context_tokens:
        less = f"ask for at most {context_tokens - count}, or " if count < context_tokens else ""
        raise Refused(
            "context_length_exceeded",
            f"the prompt has {count} tokens and max_tokens is {request.max_tokens}, {asked} in all; the context is "
            f"{context_tokens}: {less}shorten the prompt",
            prompt_tokens=count, max_tokens=request.max_tokens, context_tokens=context_tokens,
        )  # fmt: skip
    _check_tokens("prompt", request.prompt_ids, words)
    _check_tokens("stop_ids", request.stop_ids, words)
    check_sampling(request.sampling, words)


def check_sampling(sampling: Sampling, words: int) -> None:
    """Refused where a setting is out of its range, or a token isn't one of so many words."""
    ranges: tuple[tuple[str, float | None, float, float], ...] = (
        ("temperature", sampling.temperature, 0, 100),
        ("top_p", sampling.top_p, 0, 1),
        ("top_k", sampling.top_k, 0, math.inf),
        ("min_p", sampling.min_p, 0, 1),
        ("repetition_penalty", sampling.repetition_penalty, 0.01, 100),
        ("frequency_penalty", sampling.frequency_penalty, -2, 2),
        ("presence_penalty", sampling.presence_penalty, -2, 2),
        ("logprobs", sampling.logprobs, 0, MOST_LOGPROBS),
    )
    for name, value, least, most in ranges:
        said = f"at least {least}" if math.isinf(most) else f"from {least} to {most}"
        _need(value is None or (least <= value <= most and not math.isinf(value)), f"{name} must be {said}, not {value}")
    _check_tokens("logit_bias", [token for token, _ in sampling.logit_bias], words)
    _need(all(-100 <= bias <= 100 for _, bias in sampling.logit_bias), "a bias of logit_bias must be from -100 to 100")


def _check_tokens(name: str, tokens: Sequence[int], words: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < words:
        wrong = next(token for token in tokens if not 0 <= token < words)
        _need(False, f"{name} has token {wrong}, and this model's are from 0 to {words - 1}")


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Refused("invalid_request", otherwise)
