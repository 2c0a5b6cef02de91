"""One sequence's latents in a paged cache, as a LatentLayer reads them."""

from __future__ import annotations

import torch

from ktopt.cache import q8_0
from ktopt.cache.latent import LatentLayer, PagePool
from ktopt.cache.paged.batch import PagedBatch


class _Lent(PagePool):
    """Pages that the paged cache counts."""

    def __init__(self, pages_GTW: torch.Tensor) -> None:
        self.pages_GTW = pages_GTW

    def drop(self, pages: list[int]) -> None:
        """They stay whose they are."""


def latent_view(batch: PagedBatch, layer: int, piece: int, widths: tuple[int, int]) -> LatentLayer:
    """A layer that holds one sequence of a step, its new tokens included, to be read alone. `widths` are the numbers of a latent
    and of its rotary key."""
    pool, sequence = batch.pools[layer], batch.sequences[piece]
    made = LatentLayer(batch.page_tokens, q8_0.NAME if pool.shape.q8_0 else pool.shape.dtype)
    made.pool, made.dtype, made.device, made.is_initialized = _Lent(pool.keys), pool.shape.dtype, pool.shape.device, True
    made.lend([sequence.pages], int(batch.pasts[piece]) + batch.tokens[piece], widths)
    return made
