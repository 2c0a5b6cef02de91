"""One choice of a request while it is written: tokens in, pieces of text and the end out."""

from __future__ import annotations

import time
from typing import Any

from ktopt.engine.events import Piece, Reason, TokenLogprob
from ktopt.engine.request import Request
from ktopt.engine.sampling import Choice, Row
from ktopt.engine.text import Detokenizer, StopTexts


class Answer:
    """tokens   of the answer so far, its end token included
    ended    why it has ended; None while it goes on
    stop     the stop text or token that ended it
    """

    def __init__(self, request: Request, index: int, tokenizer: Any, row: Row, ends: frozenset[int]) -> None:
        self.index, self.row = index, row
        self.tokens: list[int] = []
        self.ended: Reason | None = None
        self.stop: str | int | None = None
        self.first_s = self.last_s = 0.0
        self._most, self._ends = request.max_tokens, ends
        self._text = Detokenizer(tokenizer, request.keep_special)
        self._stops = StopTexts(request.stop) if request.stop else None
        self._made = self._told = 0  # characters that tokens made, and that were given out
        self._pending: list[tuple[int, int, TokenLogprob | None]] = []  # the character that it begins at, the token
        self._logprobs = request.sampling.logprobs is not None

    def take(self, choice: Choice) -> Piece | None:
        """Add a token; the piece of text that may now be given out. `ended` says whether it was the last."""
        token = choice.token
        self.tokens.append(token)
        self.last_s = time.monotonic()
        if len(self.tokens) == 1:
            self.first_s = self.last_s
        self.row.took(token)
        if token in self._ends:
            self.ended, self.stop = "stop", token
            return self._finish("")
        self._pending.append((self._made, token, choice.logprob))
        text = self._text.add(token)
        self._made += len(text)
        if self._stops is not None and text:
            text, self.stop = self._stops.add(text)
            if self.stop is not None:
                self.ended = "stop"
                return self._piece(text, cut=True)
        if len(self.tokens) == self._most or self.row.complete:
            self.ended = "stop" if self.row.complete else "length"
            return self._finish(text)
        return self._piece(text) if text else None

    def _finish(self, text: str) -> Piece | None:
        """The last piece, with what was held back."""
        rest = self._text.rest()
        if self._stops is not None:
            more, stop = self._stops.add(rest) if rest else ("", None)
            text += more
            if stop is not None:
                self.ended, self.stop = "stop", stop
                return self._piece(text, cut=True)
            rest = self._stops.rest()
        text += rest
        self._told += len(text)
        pending, self._pending = self._pending, []
        return self._made_of(text, pending) if text or pending else None

    def _piece(self, text: str, cut: bool = False) -> Piece | None:
        """Text, and the tokens that it came from. `cut`: what tokens are left belong to a stop text."""
        self._told += len(text)
        count = next((at for at, (first, _, _) in enumerate(self._pending) if first >= self._told), len(self._pending))
        pending, self._pending = self._pending[:count], [] if cut else self._pending[count:]
        return self._made_of(text, pending) if text or pending else None

    def _made_of(self, text: str, pending: list[tuple[int, int, TokenLogprob | None]]) -> Piece:
        logprobs = tuple(each for _, _, each in pending if each is not None) if self._logprobs else None
        return Piece(self.index, text, tuple(token for _, token, _ in pending), logprobs)
