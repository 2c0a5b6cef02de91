"""Choosing a token for each of many rows of logits, each by its own settings and with its own random numbers.

What is done for a row doesn't depend on the other rows. Settings mean what they mean to transformers' processors, which tests
compare with: penalties, biases and a grammar change logits; then temperature, top_k, top_p, min_p.

Legend: N rows, V words of the vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from ktopt.engine.events import TokenLogprob
from ktopt.engine.request import Sampling

BLOCK = 256
"""Words whose chances are added up at a time."""

Array = np.ndarray[Any, np.dtype[Any]]

LEAST_TEMPERATURE = 1e-4
"""Below it the likeliest token is taken: no other has a chance that numbers could tell."""
PREFILTER = (1e-2, 1e-4, 1e-6, 1e-8)
"""Words less likely than so much of the likeliest aren't looked at, as long as those that remain suffice."""


def defaults_of(model: Any) -> Sampling:
    """What a model's generation config says of sampling: temperature 0 where it doesn't sample."""
    config = getattr(model, "generation_config", None)
    settings = config.to_diff_dict() if config is not None else {}
    penalty = float(settings.get("repetition_penalty") or 1.0)
    if not settings.get("do_sample"):
        return Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=penalty)
    said = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | {k: v for k, v in settings.items() if v is not None}
    return Sampling(
        temperature=said["temperature"], top_p=said["top_p"], top_k=said["top_k"], min_p=said["min_p"], repetition_penalty=penalty
    )


def settled(sampling: Sampling, defaults: Sampling) -> Sampling:
    """Settings with nothing left open but seed and logprobs."""
    open_ones = [field.name for field in fields(Sampling) if getattr(sampling, field.name) is None]
    return replace(sampling, **{name: getattr(defaults, name) for name in open_ones if name not in ("seed", "logprobs")})


class Grammar(Protocol):
    """What an answer must be, and how far it has come."""

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""

    def forbidden(self) -> Array:
        """The words that can't come next: bool (V); where it is shorter, those beyond it can't, either."""

    def take(self, token: int) -> None:
        """Go on by a token."""


@dataclass(frozen=True, slots=True)
class Choice:
    token: int
    logprob: TokenLogprob | None = None


class Row:
    """One answer's settings, and what they need of its tokens so far.

    sampling    without open ones, as `settled` makes it
    prompt_ids  for the repetition penalty
    index       which of a request's choices: each has its own random numbers
    grammar     what the answer must be, asked before each token
    """

    def __init__(self, sampling: Sampling, prompt_ids: Iterable[int], index: int = 0, grammar: Grammar | None = None) -> None:
        self.sampling, self.grammar = sampling, grammar
        assert sampling.temperature is not None
        self.greedy = sampling.temperature < LEAST_TEMPERATURE
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % (1 << 64)
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index))))
        self._bias = tuple(np.array(column) for column in zip(*sampling.logit_bias, strict=True))
        self._seen = None if sampling.repetition_penalty == 1.0 else _Counts(prompt_ids)
        self._new = _Counts(()) if sampling.frequency_penalty or sampling.presence_penalty else None
        self.changes = bool(self._bias) or self._seen is not None or self._new is not None or grammar is not None

    def change(self, logits_V: Array) -> None:
        """Apply penalties, biases and the grammar, in place."""
        if self._seen is not None:
            seen = self._seen.ids
            values, penalty = logits_V[seen], self.sampling.repetition_penalty
            logits_V[seen] = np.where(values < 0, values * penalty, values / penalty)
        if self._bias:
            np.add.at(logits_V, self._bias[0], self._bias[1])
        if self._new is not None:
            taken = self.sampling.frequency_penalty * self._new.counts + self.sampling.presence_penalty
            logits_V[self._new.ids] -= taken
        if self.grammar is not None:
            forbidden = self.grammar.forbidden()[: len(logits_V)]
            np.copyto(logits_V[: len(forbidden)], -np.inf, where=forbidden)
            logits_V[len(forbidden) :] = -np.inf

    def took(self, token: int) -> None:
        """Count a token of the answer."""
        for counts in (self._seen, self._new):
            if counts is not None:
                counts.add(token)
        if self.grammar is not None:
            self.grammar.take(token)

    @property
    def complete(self) -> bool:
        """Whether its grammar lets nothing follow."""
        return self.grammar is not None and self.grammar.complete

    def draw(self, chances_V: Array) -> int:
        """A token by its chances (V), which add up to 1 before top_k, top_p and min_p."""
        s = self.sampling
        assert s.top_p is not None
        assert s.top_k is not None
        assert s.min_p is not None
        target = self._random.random()
        if s.top_p >= 1 and not 0 < s.top_k < len(chances_V) and s.min_p == 0:
            return _drawn(chances_V, target)
        words, chances = _kept(chances_V, s.top_k, s.top_p, s.min_p)
        sums = np.cumsum(chances, dtype=np.float64)
        return int(words[np.searchsorted(sums, target * sums[-1], side="right")])


def _drawn(chances_V: Array, target: float) -> int:
    """The word at a part (0 up to 1) of the sum of all chances: first by blocks of words, then in its block."""
    whole = len(chances_V) // BLOCK * BLOCK
    sums = np.append(chances_V[:whole].reshape(-1, BLOCK).sum(1), chances_V[whole:].sum()).cumsum(dtype=np.float64)
    at = int(np.searchsorted(sums, target * sums[-1], side="right"))
    block = chances_V[at * BLOCK : (at + 1) * BLOCK]
    left = target * sums[-1] - (sums[at - 1] if at else 0.0)
    found = int(np.searchsorted(block.cumsum(dtype=np.float64), left, side="right"))
    return at * BLOCK + (found if found < len(block) else int(np.flatnonzero(block)[-1]))  # sums are rounded


class _Counts:
    """How often each of some tokens came, as arrays."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._at: dict[int, int] = {}
        self._ids, self._counts = np.zeros(64, dtype=np.int64), np.zeros(64, dtype=np.float32)
        for token in tokens:
            self.add(token)

    @property
    def ids(self) -> Array:
        return self._ids[: len(self._at)]

    @property
    def counts(self) -> Array:
        return self._counts[: len(self._at)]

    def add(self, token: int) -> None:
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            self._ids, self._counts = np.resize(self._ids, 2 * at), np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[at] = token
        self._counts[at] += 1


def _kept(chances_V: Array, top_k: int, top_p: float, min_p: float) -> tuple[Array, Array]:
    """The words that may be drawn, the likeliest first, and their chances."""
    most = chances_V.max()
    bound = 0.0 if top_k or top_p < 1 else min_p
    for share in PREFILTER:
        words = np.flatnonzero(chances_V >= most * max(share, bound))
        chances = chances_V[words]
        if share <= bound or _suffice(chances, top_k, top_p):
            break
    else:
        least = np.partition(chances_V, -top_k)[-top_k] if 0 < top_k < len(chances_V) else 0.0
        words = np.flatnonzero(chances_V >= least)
        chances = chances_V[words]
    order = np.argsort(-chances, kind="stable")
    words, chances = words[order], chances[order]
    if 0 < top_k < len(words):
        count = int(np.searchsorted(-chances, -chances[top_k - 1], side="right"))  # as many as are as likely as the k-th
        words, chances = words[:count], chances[:count]
    if top_p < 1:
        sums = np.cumsum(chances, dtype=np.float64)
        whole = sums[-1] if top_k else 1.0
        count = 1 + int(np.searchsorted(sums[:-1], top_p * whole, side="left"))
        words, chances = words[:count], chances[:count]
    if min_p > 0:
        count = max(1, int(np.searchsorted(-chances, -min_p * most, side="right")))
        words, chances = words[:count], chances[:count]
    return words, chances


def _suffice(chances: Array, top_k: int, top_p: float) -> bool:
    """Whether all words that may be drawn are among those with these chances."""
    if top_k:
        return len(chances) >= top_k
    return top_p >= 1 or bool(chances.sum(dtype=np.float64) >= top_p)


def choose(logits_NV: torch.Tensor, rows: Sequence[Row]) -> list[Choice | None]:
    """A token for each row; None where a row's logits are no numbers, or its grammar leaves no word."""
    logits_NV = logits_NV.detach().float().cpu()
    wanting = [at for at, row in enumerate(rows) if row.sampling.logprobs is not None]
    raw = logits_NV[wanting].log_softmax(-1) if wanting else None
    if changed := [at for at, row in enumerate(rows) if row.changes]:
        logits_NV = logits_NV.clone()
        view_NV = logits_NV.numpy()
        for at in changed:
            rows[at].change(view_NV[at])
    view_NV = logits_NV.numpy()  # numpy finds the likeliest ten times as fast as torch, and takes what is no number for it, too
    tokens: list[int | None] = [int(at) if math.isfinite(row_V[at]) else None for row_V in view_NV for at in (row_V.argmax(),)]
    if drawn := [at for at, row in enumerate(rows) if not row.greedy and tokens[at] is not None]:
        temperatures = torch.tensor([[rows[at].sampling.temperature] for at in drawn])
        drawn_NV = logits_NV if len(drawn) == len(rows) else logits_NV[drawn]
        chances_NV = (drawn_NV / temperatures).softmax(-1).numpy()
        for at, chances_V in zip(drawn, chances_NV, strict=True):
            tokens[at] = rows[at].draw(chances_V)
    told: dict[int, TokenLogprob] = {}
    if raw is not None:
        for at, logprobs_V in zip(wanting, raw, strict=True):
            if (token := tokens[at]) is not None:
                told[at] = _logprob(logprobs_V, token, rows[at].sampling.logprobs or 0)
    return [None if token is None else Choice(token, told.get(at)) for at, token in enumerate(tokens)]


def _logprob(logprobs_V: torch.Tensor, token: int, count: int) -> TokenLogprob:
    values, words = logprobs_V.topk(min(count, len(logprobs_V)))
    return TokenLogprob(token, float(logprobs_V[token]), tuple(zip(words.tolist(), values.tolist(), strict=True)))
