"""Attention over a context in blocks: blocks made from keys and values and back, and attention to blocks where they lie.

Attention to any parts of a context can be merged by the logarithm of each softmax's sum.

Legend: R rows (a KV head of a sequence, or of latents a sequence), H query heads of a row, K segments of a row, T tokens of a
segment, D numbers of a key, V of a value, C tokens of a cache; in a tile T query tokens of H heads meet G KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktopt.cache.blocks.layout import BlockLayout
from ktopt.kernels import block_reference as reference


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

    def numbers(self, value_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and which are seen (R, tokens)."""
        keys = self.keys_RCD[:, self.begin : self.end]
        values = keys[..., :value_dim] if self.values_RCV is None else self.values_RCV[:, self.begin : self.end]
        if keys.shape[1] != self.tokens or values.shape[1:] != (self.tokens, value_dim):
            raise ValueError(f"the cache hasn't tokens {self.begin} to {self.end} with values of {value_dim} numbers")
        return keys, values, _seen(self.hidden_RK, keys.shape[0], 1, self.tokens, device)


Segments = BlockSegments | CacheSegments


def _seen(hidden_RK: torch.Tensor | None, rows: int, count: int, tokens: int, device: torch.device) -> torch.Tensor:
    """bool (R, K * T)"""
    if hidden_RK is None:
        return torch.ones(rows, count * tokens, dtype=torch.bool, device=device)
    return (torch.arange(tokens, device=device) >= hidden_RK.to(device)[..., None]).reshape(rows, count * tokens)


def pack(
    keys_RTD: torch.Tensor, values_RTV: torch.Tensor | None, layout: BlockLayout, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A block of each row from its keys and values, float32, float16 or bfloat16: uint8 (R, layout.nbytes), rounded as ggml does.

    Values are left out where the layout shares them. ValueError where shapes don't fit.
    """
    rows = keys_RTD.shape[0]
    shapes = [(rows, layout.tokens, layout.key_dim), None if layout.shared else (rows, layout.tokens, layout.value_dim)]
    given = [tuple(keys_RTD.shape), None if values_RTV is None else tuple(values_RTV.shape)]
    if given != shapes or (out is not None and out.shape != (rows, layout.nbytes)):
        raise ValueError(f"keys {given[0]} and values {given[1]} don't fit blocks of {layout}")
    made = reference.pack(keys_RTD, values_RTV, layout)
    if out is None:
        return made
    return out.copy_(made)


def unpack(
    addresses_RK: torch.Tensor,
    layout: BlockLayout,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks at these addresses as keys (R, K * T, D) and values (R, K * T, V) of a dtype, one block after the other.

    `device` is where the blocks lie, and the result. ValueError for an address of 0, or an `out` that doesn't fit.
    """
    if bool((addresses_RK == 0).any()):
        raise ValueError("a block has no address")
    made = reference.unpack(addresses_RK, layout, torch.device(device))
    if out is None:
        return made[0].to(dtype), made[1].to(dtype)
    return out[0].copy_(made[0]), out[1].copy_(made[1])


def attend(
    q_RHD: torch.Tensor,
    segments: Sequence[Segments],
    *,
    value_dim: int,
    scale: float,
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q @ keys.T * scale) @ values over all that each row's segments hold, float32 (R, H, V), and the natural logarithm of
    each softmax's sum (R, H). A row that sees nothing gives zeros and -inf.

    q is float32, contiguous. Segments may be of different kinds; the order doesn't matter. threads: torch's number of them.
    """
    return attend_reference(q_RHD, segments, value_dim=value_dim, scale=scale)


def attend_reference(
    q_RHD: torch.Tensor, segments: Sequence[Segments], *, value_dim: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend` computes, in torch, in the dtype of q."""
    parts = [part.numbers(value_dim, q_RHD.device) for part in segments]
    keys, values = (torch.cat([part[i].to(q_RHD.dtype) for part in parts], 1) for i in (0, 1))
    seen = torch.cat([part[2] for part in parts], 1)
    return reference.masked_attention(q_RHD, keys, values, seen[:, None], scale)


def attend_tile(
    q_THD: torch.Tensor,
    keys_GCD: torch.Tensor,
    values_GCV: torch.Tensor,
    *,
    first: int = 0,
    start: int = 0,
    end: int | None = None,
    window: int = 0,
    causal: bool = True,
    scale: float | None = None,
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of many queries to a tile of keys, float32 (T, H, V), and the natural logarithm of each softmax's sum (T, H).

    Causal: query t stands at position first + t of the tile and sees keys from `start` (with a `window` the last so many, its own
    included) up to its own. Not causal: every query sees keys [start, end), by default all. What sees none gives zeros and -inf.
    The rest is as kernels.cpu.attention's prefill_attention has it. ValueError where shapes don't fit.
    """
    return attend_tile_reference(
        q_THD, keys_GCD, values_GCV, first=first, start=start, end=end, window=window, causal=causal, scale=scale
    )


def attend_tile_reference(
    q_THD: torch.Tensor,
    keys_GCD: torch.Tensor,
    values_GCV: torch.Tensor,
    *,
    first: int = 0,
    start: int = 0,
    end: int | None = None,
    window: int = 0,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend_tile` computes, in torch, in the dtype of q."""
    tokens, heads, dim = q_THD.shape
    kv_heads, capacity = keys_GCD.shape[:2]
    key = torch.arange(capacity, device=q_THD.device)
    shown = (key >= start).expand(tokens, capacity)
    if causal:
        position = torch.arange(first, first + tokens, device=q_THD.device)[:, None]
        shown = shown & (key <= position) & (key > position - window if window else True)
    else:
        shown = shown & (key < (capacity if end is None else end))
    group = heads // kv_heads
    queries = q_THD.unflatten(1, (kv_heads, group)).permute(1, 0, 2, 3).flatten(1, 2)
    out, log_sum = reference.masked_attention(
        queries, keys_GCD, values_GCV, shown.repeat_interleave(group, 0)[None], dim**-0.5 if scale is None else scale
    )
    out = out.unflatten(1, (tokens, group)).transpose(0, 1).flatten(1, 2)
    return out, log_sum.unflatten(1, (tokens, group)).transpose(0, 1).flatten(1, 2)


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One attention over all keys from those over parts of them, each as `attend` and `attend_tile` give it: out and log_sum."""
    if not parts:
        raise ValueError("there are no parts to merge")
    return parts[0] if len(parts) == 1 else reference.merge(parts)
