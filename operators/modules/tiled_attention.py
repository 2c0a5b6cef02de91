"""Attention in torch that never holds more than a tile of scores: a chunk of queries meets a tile of the context after another, and
the softmax is carried on from tile to tile (each result counts by the exponential of its log-sum-exp).

Legend: B sequences, N heads, S queries of a chunk, T tokens of a tile, K numbers of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ktopt.operators.latent_memory import steps

__all__ = ["Seen", "Softmax", "attend", "in_tiles", "steps"]


class Softmax:
    """A softmax-weighted sum of values that grows by tiles. `result` is (B, N, S, V) float32, zero where a query saw nothing."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._highest = self._total = torch.empty(0)

    def add(self, scores_BNST: torch.Tensor, values: torch.Tensor) -> None:
        """Take a tile: scores in float32, -inf where a token isn't seen, which are overwritten; values (B, N or 1, T, V)."""
        batch, heads, queries, tokens = scores_BNST.shape
        highest = scores_BNST.amax(-1, keepdim=True)
        if self._sum is not None:
            highest = torch.maximum(highest, self._highest)
        shift = highest.clamp(min=torch.finfo(torch.float32).min)  # a query that has seen nothing so far
        weights = scores_BNST.sub_(shift).exp_()
        total = weights.sum(-1, keepdim=True)
        narrow = weights.to(values.dtype)
        if values.shape[1] == 1:
            out = (narrow.view(batch, heads * queries, tokens) @ values[:, 0]).view(batch, heads, queries, -1).float()
        else:
            out = (narrow @ values).float()
        if self._sum is None:
            self._sum, self._total = out, total
        else:
            factor = (self._highest.clamp(min=torch.finfo(torch.float32).min) - shift).exp_()
            self._sum = self._sum.mul_(factor).add_(out)
            self._total = self._total.mul_(factor).add_(total)
        self._highest = highest

    def result(self) -> torch.Tensor:
        assert self._sum is not None
        return self._sum / torch.where(self._total == 0, 1.0, self._total)


@dataclass(frozen=True)
class Seen:
    """Which tokens each query sees.

    past   tokens before the first query: query i sees tokens up to past + i
    mask   (B or 1, 1, S, all tokens), bool with True for seen or floats to be added; None for causality alone
    """

    past: int
    mask: torch.Tensor | None = None

    def hide(self, scores_BNST: torch.Tensor, query: int, start: int) -> torch.Tensor:
        """Scores of queries from `query` on and tokens from `start` on, with -inf where a token isn't seen."""
        queries, tokens = scores_BNST.shape[2:]
        if self.mask is not None:
            mask = self.mask[:, :, query : query + queries, start : start + tokens]
            if mask.dtype is torch.bool:
                return scores_BNST.masked_fill_(~mask, float("-inf"))
            return scores_BNST.add_(mask)
        if start + tokens - 1 <= self.past + query:
            return scores_BNST
        own = torch.arange(self.past + query, self.past + query + queries, device=scores_BNST.device)
        keys = torch.arange(start, start + tokens, device=scores_BNST.device)
        return scores_BNST.masked_fill_(keys > own[:, None], float("-inf"))


Tile = tuple[int, torch.Tensor, torch.Tensor]
"""A tile of the context: its first token, keys and values, each (B, N or 1, T, K or V)."""


def attend(query_BNSK: torch.Tensor, tiles: Iterator[Tile], scale: float, seen: Seen, first: int) -> torch.Tensor:
    """Attention of a chunk of queries, the first of which is number `first` of `seen`, to (B, N, S, V) in the queries' dtype."""
    softmax = Softmax()
    batch, heads, queries, numbers = query_BNSK.shape
    for start, keys, values in tiles:
        if keys.shape[1] == 1:
            scores = (query_BNSK.reshape(batch, heads * queries, numbers) @ keys[:, 0].mT).view(batch, heads, queries, -1)
        else:
            scores = query_BNSK @ keys.mT
        scores = scores.float().mul_(scale)
        softmax.add(seen.hide(scores, first, start), values)
        del keys, values, scores  # before the next tile is made
    return softmax.result().to(query_BNSK.dtype)


def in_tiles(end: int, tokens: int, make: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Tile]:
    """The context [0, end) in tiles of so many tokens, each made when it is wanted."""
    for start in range(0, end, tokens):
        yield (start, *make(start, min(start + tokens, end)))
