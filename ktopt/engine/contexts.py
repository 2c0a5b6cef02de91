"""What one request at a time runs on: a context that is kept between requests, of which a prompt reads only what is new.

Legend: T tokens, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ktopt.runtime.decoding import Decoder, cache_bytes, takes_back

PIECE_TOKENS = 512
"""Tokens of a prompt that are read at a time where a model's plan doesn't say: a request may be cancelled after each."""

OnRead = Callable[[int, int], None]
"""Called with the tokens of a prompt that are read, and those that needn't be read. Where it raises, reading stops there."""


class Context(Protocol):
    """What it holds at most, and what a prompt may have of it; None where that has no bound of its own."""

    most_tokens: int | None
    most_prompt_tokens: int | None

    def read(self, ids: Sequence[int], on_read: OnRead) -> torch.Tensor:
        """Make these its tokens; the logits (1, V) of what follows."""

    def step(self, token: int) -> torch.Tensor:
        """Add a token; the logits (1, V) of what follows."""

    def forget(self) -> None:
        """Begin anew: a step has failed."""

    def memory_bytes(self) -> Mapping[str, int]:
        """What it holds, by tier."""

    def close(self) -> None: ...


class CacheContext:
    """A transformers Cache of the kind that the model's layers want. What it has in common with a prompt isn't computed again,
    where its layers can give tokens back; else where the prompt goes on after all of it.

    The logits after a prompt are kept, too: several choices, or the same prompt again, begin with the same numbers.
    """

    most_tokens: int | None = None
    most_prompt_tokens: int | None = None

    def __init__(self, model: Any) -> None:
        self._decoder = Decoder(model)
        self._piece = self._decoder.piece or PIECE_TOKENS
        self.forget()

    def forget(self) -> None:
        self._cache: Any = None
        self._ids: list[int] = []
        self._prompt: tuple[int, torch.Tensor] | None = None  # how many tokens it had, and the logits after it

    def read(self, ids: Sequence[int], on_read: OnRead) -> torch.Tensor:
        ids = list(ids)
        reused = self._crop_to(ids)
        if self._prompt is not None and self._prompt[0] == reused == len(ids):
            on_read(reused, reused)
            return self._prompt[1]
        self._prompt = None
        logits_1V = torch.empty(0)
        for first in range(reused, len(ids), self._piece):
            logits_1V = self._add(ids[first : first + self._piece])
            on_read(len(self._ids), reused)
        self._prompt = (len(ids), logits_1V)
        return logits_1V

    def step(self, token: int) -> torch.Tensor:
        return self._add([token])

    def _add(self, ids: list[int]) -> torch.Tensor:
        try:
            logits_1V = self._decoder.logits(torch.tensor([ids], device=self._decoder.device), self._cache)[:, 0]
        except BaseException:
            self.forget()  # some layers may have read what others haven't
            raise
        if not self._ids:
            _let_grow(self._cache)
        self._ids += ids
        return logits_1V

    def _crop_to(self, ids: list[int]) -> int:
        """Forget what isn't in a prompt, and where nothing is known of what follows, its last token too; tokens that remain."""
        common = _common(self._ids, ids)
        known = self._prompt is not None and self._prompt[0] == common == len(ids)
        keep = common if known else min(common, len(ids) - 1)
        if self._cache is not None and keep < len(self._ids):
            if keep and takes_back(self._cache):
                self._cache.crop(keep - len(self._ids))
                self._ids = self._ids[:keep]
            else:
                self.forget()
        if self._cache is None:
            self._cache = self._decoder.new_cache()
            for layer in getattr(self._cache, "layers", []):
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
        return len(self._ids)

    def memory_bytes(self) -> Mapping[str, int]:
        return {"memory": cache_bytes(self._cache)}

    def close(self) -> None:
        self.forget()


def _let_grow(cache: Any) -> None:
    """Replace transformers' own layers, of which a sliding one gives tokens back only once, by ktopt's. Those that an operator has
    made its own stay."""
    from ktopt.cache.growing import growing_layer

    for index in range(len(getattr(cache, "layers", []))):
        growing_layer(cache, index, None)


def _common(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with."""
    return next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), min(len(first), len(second))
    )
