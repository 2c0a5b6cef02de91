"""One step of a model over many sequences at once: pieces of prompts and single tokens that decode, side by side."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Any

import torch

from ktopt.cache.paged.cache import PagedCache
from ktopt.cache.paged.sequence import Sequence
from ktopt.diagnostics import UsageError


def forward_paged(model: Any, cache: PagedCache, pieces: list[tuple[Sequence, Ids[int]]]) -> torch.Tensor:
    """Read new tokens of some sequences, each after those that it has; the logits (N, V) of each one's last new token, float32, in
    the order of `pieces`.

    UsageError for pieces without tokens, sequences that stand there twice, or another cache's. NoRoom, before any work, where pages
    are lacking that weren't reserved. After any exception the sequences have the tokens that they had.
    """
    if model is not cache.call.model:
        raise UsageError("the paged cache was made for another model")
    batch = cache.begin(pieces)
    ids = [token for _, new in pieces for token in new]
    positions = [at for sequence, new in pieces for at in range(sequence.length, sequence.length + len(new))]
    logits_NV = cache.call.logits(batch, ids, positions, (batch.firsts[1:] - 1).tolist())
    cache.finish(pieces)
    return logits_NV
