"""What an engine says of a request, in order: what it has read, pieces of text, and how each choice ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log probability, and those of the likeliest tokens in its place, the likeliest first: (token, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """A piece of the prompt has been read. `read_tokens` counts those that were cached, too."""

    read_tokens: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """More of choice `index`: whole characters, and the tokens that they came from, one or several. Tokens without text (special
    ones, half a character at the end) come with a later piece or with an empty one at the end; those of a text that stopped the
    answer don't come. `logprobs` has one for each token where they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens: of the prompt; of those, not computed since a cache had them; of this choice, its end token included."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds: waiting for its turn; from there to the first token; from the first token to the last."""

    queued_s: float
    prefill_s: float
    decode_s: float

    @property
    def first_token_s(self) -> float:
        """From submit to the first token."""
        return self.queued_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Finished:
    """Choice `index` has ended: by a stop text or token (`stop`), by max_tokens, or since it was cancelled. Nothing of this choice
    follows, and after the last choice nothing at all."""

    index: int
    reason: Reason
    usage: Usage
    timings: Timings
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has failed, with all its choices. Nothing follows."""

    message: str
    code: str = "internal_error"


Event = Reading | Piece | Finished | Failed
