"""What rows of queries attend to: segments, each some tokens one after another, of any kind and anywhere in memory.

Legend: R rows (a KV head of a sequence, or of latents a sequence), K segments of a row, T tokens of a segment, D numbers of a key,
V of a value, C tokens of a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktopt.cache.blocks.layout import BlockLayout
from ktopt.kernels import block_reference as reference
from ktopt.kernels.cpu.token_blocks import Group
from ktopt.weights.ggml_types import BY_NAME

KIND_OF = {dtype: kind for kind, dtype in reference.DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class BlockSegments:
    """Blocks that each row attends to: addresses (R, K) int64 on the CPU, of blocks of `layout`.

    hidden (R, K) int64: how many of a block's first tokens aren't seen (padding). A block of which none is seen may have any
    address. Whoever owns the blocks keeps them in memory until the attention is done.
    """

    layout: BlockLayout
    addresses_RK: torch.Tensor
    hidden_RK: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Of a row, hidden ones included."""
        return int(self.addresses_RK.shape[1]) * self.layout.tokens

    @property
    def together(self) -> int:
        """What dimensions must be multiples of for the CPU's kernel."""
        return max(16, BY_NAME[self.layout.kind].block_elements)

    def group(self, rows: int, key_dim: int, value_dim: int) -> Group:
        """What the CPU's kernel takes. ValueError where the queries don't fit."""
        layout, addresses, hidden = self.layout, self.addresses_RK, self.hidden_RK
        if (layout.key_dim, layout.value_dim) != (key_dim, value_dim) or len(addresses) != rows:
            raise ValueError(
                f"addresses {list(addresses.shape)} of {layout} don't fit {rows} rows of {key_dim} and {value_dim} numbers"
            )
        count = addresses.shape[1]
        if addresses.dtype is not torch.int64 or (count > 1 and addresses.stride(1) != 1):
            raise ValueError("addresses must be int64, a row's one after another")
        at = addresses.data_ptr(), max(addresses.stride(0), count)
        kind = BY_NAME[layout.kind].number
        return kind, layout.tokens, count, *at, 0, layout.value_offset, 0, 0, _hidden(hidden, rows, count)

    def numbers(self, value_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and which are seen (R, K * T)."""
        if self.layout.value_dim != value_dim:
            raise ValueError(f"blocks have values of {self.layout.value_dim} numbers, and {value_dim} are wanted")
        seen = _seen(self.hidden_RK, len(self.addresses_RK), self.addresses_RK.shape[1], self.layout.tokens, device)
        some = seen.unflatten(1, (-1, self.layout.tokens)).any(-1).cpu()
        if bool((self.addresses_RK[some] == 0).any()):
            raise ValueError("a block has no address")
        blank = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        there = torch.where(some, self.addresses_RK, blank.data_ptr())
        return *reference.unpack(there, self.layout, device), seen


@dataclass(frozen=True, slots=True, eq=False)
class CacheSegments:
    """Tokens [begin, end) of a cache, which each row attends to: keys (R, C, D) and values (R, C, V) of one dtype, float32, float16
    or bfloat16, each row contiguous. Without values a value is the first numbers of its key (latents).

    hidden (R, 1) int64: how many of the first of these tokens aren't seen (padding).
    """

    keys_RCD: torch.Tensor
    values_RCV: torch.Tensor | None
    begin: int
    end: int
    hidden_RK: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Of a row, hidden ones included."""
        return self.end - self.begin

    @property
    def together(self) -> int:
        """What dimensions must be multiples of for the CPU's kernel."""
        return 16

    def group(self, rows: int, key_dim: int, value_dim: int) -> Group:
        """What the CPU's kernel takes. ValueError where the queries don't fit."""
        keys, values, begin = self.keys_RCD, self.values_RCV, self.begin
        kind = KIND_OF.get(keys.dtype)
        fits = keys.shape[0] == rows and keys.shape[2] == key_dim and 0 <= begin <= self.end <= keys.shape[1]
        if kind is None or not fits:
            raise ValueError(
                f"tokens {begin} to {self.end} of keys {list(keys.shape)} ({keys.dtype}) don't fit {rows} rows of {key_dim} numbers"
            )
        size = keys.element_size()
        at = self.keys_RCD.data_ptr() + begin * key_dim * size
        stride = keys.stride(0) * size
        value_at, value_stride = at, stride
        if values is not None:
            if values.dtype is not keys.dtype or values.shape[:2] != keys.shape[:2] or values.shape[2] != value_dim:
                raise ValueError(f"values {list(values.shape)} in {values.dtype} don't fit keys {list(keys.shape)} in {keys.dtype}")
            value_at, value_stride = values.data_ptr() + begin * value_dim * size, values.stride(0) * size
        if not keys[:1].is_contiguous() or not (values is None or values[:1].is_contiguous()):
            raise ValueError("each row of keys and values must be contiguous")
        number = BY_NAME[kind].number
        return number, self.tokens, 1, 0, 0, at, value_at, stride, value_stride, _hidden(self.hidden_RK, rows, 1)

    def numbers(self, value_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and which are seen (R, tokens)."""
        keys = self.keys_RCD[:, self.begin : self.end]
        values = keys[..., :value_dim] if self.values_RCV is None else self.values_RCV[:, self.begin : self.end]
        if keys.shape[1] != self.tokens or values.shape[1:] != (self.tokens, value_dim):
            raise ValueError(f"the cache hasn't tokens {self.begin} to {self.end} with values of {value_dim} numbers")
        return keys, values, _seen(self.hidden_RK, keys.shape[0], 1, self.tokens, device)


Segments = BlockSegments | CacheSegments


def _hidden(hidden_RK: torch.Tensor | None, rows: int, count: int) -> int:
    """Its address, or 0."""
    if hidden_RK is None:
        return 0
    if hidden_RK.shape != (rows, count) or hidden_RK.dtype is not torch.int64 or not hidden_RK.is_contiguous():
        raise ValueError(f"hidden must be int64 ({rows}, {count}), contiguous, not {hidden_RK.dtype} {list(hidden_RK.shape)}")
    return int(hidden_RK.data_ptr())


def _seen(hidden_RK: torch.Tensor | None, rows: int, count: int, tokens: int, device: torch.device) -> torch.Tensor:
    """bool (R, K * T)"""
    if hidden_RK is None:
        return torch.ones(rows, count * tokens, dtype=torch.bool, device=device)
    return (torch.arange(tokens, device=device) >= hidden_RK.to(device)[..., None]).reshape(rows, count * tokens)
