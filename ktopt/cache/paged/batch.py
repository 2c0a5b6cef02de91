"""What a model's layers are given as their cache for one step over many sequences of a paged cache.

The new tokens of all sequences, one sequence after another, are the rows of a batch of one. A layer of transformers calls `update`,
which puts keys and values into pages, and then its attention function, which is attention.py's; a kernel reads the addresses.

Legend: N pieces (a sequence and its new tokens), S rows, H heads of keys and values, D numbers of a key, V of a value, W of a
latent with its rotary key, X tokens up to a sequence's last one.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from ktopt.cache import q8_0
from ktopt.cache.paged.pools import LayerPool, LayerShape
from ktopt.cache.paged.sequence import Sequence
from ktopt.diagnostics import KtoptError


class PagedBatch(Cache):
    """One step. `pieces` are sequences, each with room in its pages, and how many new tokens each has.

    firsts  where the rows of each piece begin, and at the end how many rows there are, int64 (N + 1)
    pasts   tokens of each sequence before its new ones, int64 (N)
    steady  whether a row's result is to have the same bits whatever other rows there are
    tables  the address of each sequence's pages, int32, as int64 (N)
    """

    probing = False

    def __init__(
        self, pieces: list[tuple[Sequence, int]], pools: dict[int, LayerPool], page_tokens: int, steady: bool = False
    ) -> None:
        super().__init__(layers=[])
        self.steady = steady
        self.sequences = [sequence for sequence, _ in pieces]
        self.page_tokens, self.pools = page_tokens, pools
        self.tokens = [tokens for _, tokens in pieces]
        self.firsts = np.zeros(len(pieces) + 1, dtype=np.int64)
        np.cumsum(self.tokens, out=self.firsts[1:])
        self.pasts = np.array([sequence.length for sequence in self.sequences], dtype=np.int64)
        self.tables = np.array([sequence.table.ctypes.data for sequence in self.sequences], dtype=np.int64)

    @property
    def rows(self) -> int:
        """New tokens of all sequences."""
        return int(self.firsts[-1])

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """What kernels take for the step: how many sequences, and where `firsts`, `pasts` and `tables` are."""
        return len(self.tokens), *(int(each.ctypes.data) for each in (self.firsts, self.pasts, self.tables))  # type: ignore[return-value]

    def rows_of(self, piece: int) -> slice:
        """The rows of one piece."""
        return slice(int(self.firsts[piece]), int(self.firsts[piece + 1]))

    def pool(self, layer: int, shape: LayerShape) -> LayerPool | None:
        """The memory of a layer of such a shape; what it holds numbers in, and where, stays as it was first. None while
        shapes are only being asked for. KtoptError where the cache was made for another."""
        pool = self.pools.get(layer)
        if pool is None or pool.shape.sizes != shape.sizes:
            raise KtoptError(
                f"layer {layer} keeps {shape.heads} heads of {shape.key_dim} and {shape.value_dim} numbers, and the paged cache "
                f"was made for {'none' if pool is None else pool.shape}"
            )
        return pool

    @cached_property
    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row its page and its place in there, int64 (S)."""
        pages, places = [], []
        for sequence, past, tokens in zip(self.sequences, self.pasts.tolist(), self.tokens, strict=True):
            at = np.arange(past, past + tokens)
            pages.append(sequence.table[at // self.page_tokens])
            places.append(at % self.page_tokens)
        return torch.from_numpy(np.concatenate(pages).astype(np.int64)), torch.from_numpy(np.concatenate(places))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put keys (1, H, S, D) and values (1, H, S, V) of the new tokens into their pages; answers them as they are."""
        sizes = key_states.shape[1], key_states.shape[3], value_states.shape[3]
        pool = self.pool(layer_idx, LayerShape(*sizes, key_states.dtype, key_states.device))
        if pool is not None:
            pages, places = (each.to(key_states.device) for each in self.slots)
            for held, states in zip(pool.memory, (key_states, value_states), strict=True):
                held[pages, :, places] = states[0].transpose(0, 1).to(held.dtype)
        return key_states, value_states

    def put_latents(self, layer: int, latents_SW: torch.Tensor) -> None:
        """Put the latents of the new tokens into their pages."""
        pool = self.pools[layer]
        pages, places = (each.to(latents_SW.device) for each in self.slots)
        pool.keys[pages, places] = q8_0.quantized(latents_SW) if pool.shape.q8_0 else latents_SW.to(pool.keys.dtype)

    def read(self, layer: int, piece: int, begin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (H, X - begin, D) and values of one sequence, its new tokens included, as they are kept."""
        sequence, size = self.sequences[piece], self.page_tokens
        end = int(self.pasts[piece]) + self.tokens[piece]
        first = begin // size
        pages = torch.from_numpy(sequence.table[first : -(-end // size)].astype(np.int64))
        cut = slice(begin - first * size, end - first * size)
        keys, values = (held[pages.to(held.device)].transpose(0, 1).flatten(1, 2)[:, cut] for held in self.pools[layer].memory)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing: positions are given explicitly."""
        return 0


class Probe(PagedBatch):
    """A step of one token that asks every layer what it would keep, and keeps nothing. Layers may answer anything of the right
    shape."""

    probing = True

    def __init__(self, page_tokens: int) -> None:
        super().__init__([(Sequence([], [0]), 1)], {}, page_tokens)
        self.shapes: dict[int, LayerShape] = {}

    def pool(self, layer: int, shape: LayerShape) -> None:
        self.shapes[layer] = shape
