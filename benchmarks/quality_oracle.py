"""What anchors are measured against, for long_context_quality.py: choosing by the attention that the blocks would really get, and
choosing none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ktopt.operators.modules import block_choice


@contextmanager
def oracle_selection(kind: str) -> Iterator[None]:
    """While it lasts, blocks are chosen by their true mass ("oracle"), or none at all ("local"); "" changes nothing."""
    before = block_choice._best
    if kind:
        block_choice._best = {"oracle": _truly_best, "local": _none}[kind]  # type: ignore[assignment]
    try:
        yield
    finally:
        block_choice._best = before


def _none(held: Any, q_RHD: torch.Tensor, count: int, allowed_RM: torch.Tensor | None, ends: Any) -> torch.Tensor:
    return torch.empty(len(q_RHD), 0, dtype=torch.int32)


def _truly_best(held: Any, q_RHD: torch.Tensor, count: int, allowed_RM: torch.Tensor | None, ends: Any) -> torch.Tensor:
    """The blocks (R, K) with the most mass of each row's query heads, those of the sink and the window counted in the softmax."""
    sink = held.sink.memory[0].flatten(0, 1)
    window = held.window.there()[0].flatten(0, 1)
    parts = [sink, *(held.blocks(*tile)[0] for tile in held.tiles()), window]
    keys_RND = torch.cat([part.float() for part in parts], dim=1)
    weights_RHN = (q_RHD.float() @ keys_RND.transpose(1, 2) * held.scale).softmax(-1)
    first, tokens = sink.shape[1], held.shared.tokens
    mass_RM = weights_RHN[..., first : first + held.middle * tokens].unflatten(-1, (held.middle, tokens)).sum((1, 3))
    return mass_RM.topk(min(count, held.middle), dim=1).indices.sort(dim=1).values.int()
