"""The memory of a paged cache: for each layer, what its attention keeps of a token, page by page.

Legend: G pages of T tokens, H heads of keys and values, D numbers of a key, V of a value, W of a latent with its rotary key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from ktopt.cache import q8_0
from ktopt.cache.huge_pages import ask_for_huge_pages
from ktopt.cache.latent import KINDS

ALIGNMENT = 4096
"""Where the memory of each tensor begins."""


@dataclass(frozen=True)
class LayerShape:
    """What a layer keeps of a token: `heads` keys of `key_dim` numbers and values of `value_dim`, in `dtype`; or one latent of
    `key_dim` numbers, its rotary key included, and no values (value_dim 0), kept in `dtype` or in blocks of Q8_0."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    q8_0: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.heads, self.key_dim, self.value_dim

    @property
    def bytes_per_token(self) -> int:
        if self.q8_0:
            return q8_0.stored_bytes(self.key_dim)
        return self.heads * (self.key_dim + self.value_dim) * int(self.dtype.itemsize)


class LayerPool:
    """Keys (G, H, T, D) and values (G, H, T, V) of one layer; for latents one tensor (G, T, W), in Q8_0 of bytes. They lie in
    `memory`, of bytes."""

    def __init__(self, shape: LayerShape, pages: int, page_tokens: int, memory: torch.Tensor) -> None:
        self.shape, self.page_tokens = shape, page_tokens
        self.memory: list[torch.Tensor] = []
        at = 0
        for sizes, dtype in _tensors(shape, pages, page_tokens):
            nbytes = math.prod(sizes) * dtype.itemsize
            self.memory.append(memory[at : at + nbytes].view(dtype).view(sizes))
            at += _rounded(nbytes)

    @property
    def kind(self) -> str | None:
        """The storage type of what the pages hold, None for one that the kernels don't know."""
        return q8_0.NAME if self.shape.q8_0 else KINDS.get(self.shape.dtype)

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """What kernels take for the memory: where keys and values are (0 for none), how many pages, and tokens of each."""
        values = self.memory[1].data_ptr() if self.shape.value_dim else 0
        return self.keys.data_ptr(), values, self.keys.shape[0], self.page_tokens

    @property
    def keys(self) -> torch.Tensor:
        return self.memory[0]

    @property
    def values(self) -> torch.Tensor:
        return self.memory[1]

    def page_bytes(self, page: int) -> list[torch.Tensor]:
        """What a page holds, as bytes in place."""
        return [held[page].view(-1).view(torch.uint8) for held in self.memory]

    def copy_page(self, source: int, target: int) -> None:
        """Have a page hold what another does."""
        for held in self.memory:
            held[target] = held[source]


def pools_of(shapes: dict[int, LayerShape], pages: int, page_tokens: int) -> dict[int, LayerPool]:
    """The memory of all layers, one stretch on each device: so much at once that huge pages back all of it."""
    sizes = {
        layer: sum(_rounded(math.prod(each) * dtype.itemsize) for each, dtype in _tensors(shape, pages, page_tokens))
        for layer, shape in shapes.items()
    }
    left: dict[torch.device, torch.Tensor] = {}
    for device in {shape.device for shape in shapes.values()}:
        nbytes = sum(size for layer, size in sizes.items() if shapes[layer].device == device)
        with torch.inference_mode(False):  # the cache may be used outside of it later
            left[device] = ask_for_huge_pages(torch.empty(nbytes, dtype=torch.uint8, device=device))
    made = {}
    for layer, shape in shapes.items():
        made[layer] = LayerPool(shape, pages, page_tokens, left[shape.device])
        left[shape.device] = left[shape.device][sizes[layer] :]
    return made


def _tensors(shape: LayerShape, pages: int, page_tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Sizes and dtypes of what a layer keeps."""
    if shape.q8_0:
        return [((pages, page_tokens, q8_0.stored_bytes(shape.key_dim)), torch.uint8)]
    if not shape.value_dim:
        return [((pages, page_tokens, shape.key_dim), shape.dtype)]
    return [((pages, shape.heads, page_tokens, dim), shape.dtype) for dim in (shape.key_dim, shape.value_dim)]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
