"""Tokens to text as they come: whole characters, and up to a text that stops the answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes half a character to."""
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""
THINKING = "<think>\n"
"""With which models that think begin their answers."""


class Detokenizer:
    """Text of a growing list of tokens. A character of several tokens comes with its last one. All pieces together are what the
    tokenizer makes of all tokens at once (`clean_up_tokenization_spaces` off).

    Only the last tokens that had text are decoded again with each new one, since a decoder may join or strip where a text begins.
    """

    def __init__(self, tokenizer: Any, keep_special: bool = False) -> None:
        self._decode = _decoder(tokenizer, skip_special=not keep_special)
        self._tokens: list[int] = []
        self._told = ""  # the text of the first `_read` of them
        self._read = 0

    def add(self, token: int) -> str:
        """The text that a token adds, perhaps none yet."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if len(text) <= len(self._told) or text.endswith(UNFINISHED):
            return ""
        piece = text[len(self._told) :]
        if self._read:
            self._tokens = self._tokens[self._read :]
            text = self._decode(self._tokens)
        self._told, self._read = text, len(self._tokens)
        return piece

    def rest(self) -> str:
        """What was held back to the end."""
        return self._decode(self._tokens)[len(self._told) :]


def _decoder(tokenizer: Any, skip_special: bool) -> Callable[[list[int]], str]:
    """The shortest way to a tokenizer's text of some tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return functools.partial(backend.decode, skip_special_tokens=skip_special)
    return functools.partial(tokenizer.decode, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


class StopTexts:
    """Lets text through up to the first of some stop texts. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""

    def add(self, text: str) -> tuple[str, str | None]:
        """The text that may be given out, and the stop text that follows it, if one has come."""
        held = self._held + text
        found = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda each: each[0])
            self._held = ""
            return held[:at], stop
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def rest(self) -> str:
        """What was held back to the end."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop text begins with."""
    return next((count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])), 0)


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """What a token stands for, as bytes: also one that is half a character. Tokens that the tokenizer hasn't are none."""
    added, bytes_of = _spelling(tokenizer)
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:
        return b""
    if token in added:
        return bytes(piece.encode())
    if bytes_of is not None:
        return bytes(bytes_of[character] for character in piece)
    if (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)) is not None:
        return bytes.fromhex(byte[1])
    return bytes(piece.replace(WORD_START, " ").encode())


@functools.lru_cache(maxsize=8)
def _spelling(tokenizer: Any) -> tuple[frozenset[int], dict[str, int] | None]:
    """The tokens that stand for their own text, and of a byte-level tokenizer the byte for each character of the others."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    added, backend = frozenset(tokenizer.added_tokens_decoder), getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or b"ByteLevel" not in backend.decoder.__getstate__():
        return added, None
    return added, {character: byte for byte, character in bytes_to_unicode().items()}
