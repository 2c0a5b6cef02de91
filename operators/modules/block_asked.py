"""The last queries of a prompt, and how much they attended to keys: what DYNAMIC anchors and the preselection go by.

Legend: B sequences, N query heads, G heads of keys, R = B * G rows, H = N / G query heads of a row, Q kept queries, X keys.
"""

from __future__ import annotations

import torch

from ktopt.cache.blocks.memory import KEPT_QUERIES
from ktopt.operators.dynamic import ASKED_SCORES as SCORES


class Asked:
    """Up to KEPT_QUERIES queries (B, N, Q, D), float32, of tokens one after the other, with the logarithm of each softmax's sum.
    `end` is the position after the last."""

    def __init__(self) -> None:
        self.end = 0
        self._queries_BNQD = self._log_sums_BNQ = torch.empty(0)

    @property
    def queries(self) -> int:
        return 0 if self._queries_BNQD.ndim < 4 else self._queries_BNQD.shape[2]

    def add(self, queries_BNQD: torch.Tensor, log_sums_BNQ: torch.Tensor, end: int) -> None:
        """Keep more of them, which stand before `end`; those that aren't next to them are forgotten."""
        if self.queries and self.end == end - queries_BNQD.shape[2]:
            queries_BNQD = torch.cat((self._queries_BNQD, queries_BNQD), dim=2)
            log_sums_BNQ = torch.cat((self._log_sums_BNQ, log_sums_BNQ), dim=2)
        self._queries_BNQD, self._log_sums_BNQ = (
            queries_BNQD[:, :, -KEPT_QUERIES:].clone(),
            log_sums_BNQ[:, :, -KEPT_QUERIES:].clone(),
        )
        self.end = end

    def truncate(self, end: int) -> None:
        """Forget the queries of tokens that stand at `end` or later."""
        gone = self.end - end
        if gone > 0:
            kept = max(0, self.queries - gone)
            self._queries_BNQD, self._log_sums_BNQ = self._queries_BNQD[:, :, :kept], self._log_sums_BNQ[:, :, :kept]
            self.end = end

    def importance(self, keys_RXD: torch.Tensor, first: int, scale: float, starts_R: torch.Tensor | None) -> torch.Tensor:
        """The softmax's weight on each key, summed over the kept queries and the row's heads: float32 (R, X).

        The keys stand at positions from `first` on; a query sees those up to its own, and a row those from its start on.
        """
        rows, count, _ = keys_RXD.shape
        batch, heads, queries, dim = self._queries_BNQD.shape
        asked_RQD = self._queries_BNQD.reshape(rows, -1, dim)
        sums_RQ1 = self._log_sums_BNQ.reshape(rows, -1, 1)
        device = keys_RXD.device
        own_Q1 = torch.arange(self.end - queries, self.end, device=device).repeat(heads * batch // rows).unsqueeze(1)
        found = torch.empty(rows, count, device=device)
        step = max(1, SCORES // (rows * asked_RQD.shape[1]))
        for at in range(0, count, step):
            keys = keys_RXD[:, at : at + step].float()
            weights = (asked_RQD @ keys.mT).mul_(scale).sub_(sums_RQ1)
            position_X = torch.arange(first + at, first + at + keys.shape[1], device=device)
            if first + at + keys.shape[1] - 1 > self.end - queries:
                weights.masked_fill_(position_X > own_Q1, float("-inf"))
            if starts_R is not None:
                weights.masked_fill_(position_X < starts_R[:, None, None], float("-inf"))
            weights.masked_fill_(sums_RQ1 == float("-inf"), float("-inf"))
            found[:, at : at + step] = weights.exp_().sum(1)
        return found
