"""Attention over a context in blocks: blocks made from keys and values and back, and attention to blocks where they lie.

Attention to any parts of a context can be merged by the logarithm of each softmax's sum.

Legend: R rows (a KV head of a sequence, or of latents a sequence), H query heads of a row, K segments of a row, T tokens of a
segment, D numbers of a key, V of a value, C tokens of a cache; in a tile T query tokens of H heads meet G KV heads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch

from ktopt.cache.blocks.layout import BlockLayout
from ktopt.diagnostics import KtoptError
from ktopt.kernels import block_reference as reference
from ktopt.kernels import cpu
from ktopt.kernels.cpu import attention as cpu_attention
from ktopt.kernels.cpu import token_blocks as kernels
from ktopt.kernels.segments import BlockSegments, CacheSegments, Segments

__all__ = [
    "BlockSegments", "CacheSegments", "Segments", "attend", "attend_reference", "attend_tile", "attend_tile_reference", "merge",
    "pack", "unpack",
]  # fmt: skip

log = logging.getLogger(__name__)

SCORES = 1 << 26
"""Scores, of queries and keys, that torch has in memory at a time."""


@cache
def _say(reason: str) -> None:
    """Once for each reason."""
    log.warning("blocks are computed by torch: %s", reason)


def _on_cpu(device: torch.device, *, fits: bool = True) -> bool:
    """Whether the CPU's kernels compute this; where not, the log says why."""
    there, reason = cpu.available()
    if device.type == "cpu" and there and fits:
        return True
    if device.type != "cpu":
        reason = f"there are no kernels for {device.type}"
    elif there:
        reason = "kernels take dimensions that are multiples of 16, and of 32 for Q8_0 and Q4_0"
    _say(reason)
    return False


def pack(
    keys_RTD: torch.Tensor,
    values_RTV: torch.Tensor | None,
    layout: BlockLayout,
    *,
    out: torch.Tensor | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """A block of each row from its keys and values, float32, float16 or bfloat16: uint8 (R, layout.nbytes), rounded as ggml does.

    Values are left out where the layout shares them. ValueError where shapes don't fit; KtoptError for numbers that the layout's
    kind can't hold: inf and NaN in Q8_0 and Q4_0, and what float16 ends before (65504), or a scale in it.
    """
    rows = keys_RTD.shape[0]
    shapes = [(rows, layout.tokens, layout.key_dim), None if layout.shared else (rows, layout.tokens, layout.value_dim)]
    given = [tuple(keys_RTD.shape), None if values_RTV is None else tuple(values_RTV.shape)]
    if given != shapes or (out is not None and out.shape != (rows, layout.nbytes)):
        raise ValueError(f"keys {given[0]} and values {given[1]} don't fit blocks of {layout}")
    if not _on_cpu(keys_RTD.device):
        if not all(reference.fits(x, layout.kind) for x in (keys_RTD, values_RTV) if x is not None):
            raise KtoptError(kernels.TOO_LARGE.format(layout.kind))
        made = reference.pack(keys_RTD, values_RTV, layout)
        return made if out is None else out.copy_(made)
    if out is None:
        out = torch.empty(rows, layout.nbytes, dtype=torch.uint8)
    elif out.dtype is not torch.uint8 or out.stride(1) != 1:
        raise ValueError("blocks are made in uint8, a row's bytes one after another")
    keys, values = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (keys_RTD, values_RTV))
    assert keys is not None
    kernels.pack(keys, values, layout, out, threads or torch.get_num_threads())
    return out


def unpack(
    addresses_RK: torch.Tensor,
    layout: BlockLayout,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks at these addresses as keys (R, K * T, D) and values (R, K * T, V) of a dtype, one block after the other.

    `device` is where the blocks lie, and the result. ValueError for an address of 0, or an `out` that doesn't fit.
    """
    if bool((addresses_RK == 0).any()):
        raise ValueError("a block has no address")
    rows, tokens = addresses_RK.shape[0], addresses_RK.shape[1] * layout.tokens
    keys, values = out or (torch.empty(rows, tokens, dim, dtype=dtype, device=device) for dim in (layout.key_dim, layout.value_dim))
    if (
        keys.shape != (rows, tokens, layout.key_dim)
        or values.shape != (rows, tokens, layout.value_dim)
        or keys.dtype != values.dtype
    ):
        raise ValueError(
            f"keys {list(keys.shape)} and values {list(values.shape)} don't fit {rows} rows of {tokens} tokens in {layout}"
        )
    if not _on_cpu(keys.device):
        made = reference.unpack(addresses_RK, layout, keys.device)
        return keys.copy_(made[0]), values.copy_(made[1])
    if not keys[:1].is_contiguous() or not values[:1].is_contiguous():
        raise ValueError("each row of keys and values must be contiguous")
    if addresses_RK.numel():
        kernels.unpack(addresses_RK.contiguous(), layout, keys, values, threads or torch.get_num_threads())
    return keys, values


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
    rows, heads, key_dim = q_RHD.shape
    together = max([part.together for part in segments], default=16)
    if not _on_cpu(q_RHD.device, fits=key_dim % together == 0 and value_dim % together == 0):
        return attend_reference(q_RHD, segments, value_dim=value_dim, scale=scale)
    if q_RHD.dtype is not torch.float32 or not q_RHD.is_contiguous():
        raise ValueError(f"queries must be float32 and contiguous, not {q_RHD.dtype} with strides {q_RHD.stride()}")
    out, log_sum = torch.empty(rows, heads, value_dim), torch.empty(rows, heads)
    groups = [part.group(rows, key_dim, value_dim) for part in segments]
    kernels.attend(q_RHD, groups, out, log_sum, scale, threads or torch.get_num_threads())
    return out, log_sum


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
    if not causal:
        end = keys_GCD.shape[1] if end is None else end
    elif end is not None:
        raise ValueError("a causal tile ends where its queries do")
    if not _on_cpu(q_THD.device, fits=all(dim % 8 == 0 for dim in (q_THD.shape[2], values_GCV.shape[2]))):
        step = max(1, SCORES // max(1, q_THD.shape[1] * keys_GCD.shape[1]))
        parts = [
            attend_tile_reference(
                some, keys_GCD, values_GCV, first=first + at * step, start=start, end=end, window=window, causal=causal, scale=scale
            )
            for at, some in enumerate(q_THD.split(step))
        ]
        return parts[0] if len(parts) == 1 else (torch.cat([out for out, _ in parts]), torch.cat([log_sum for _, log_sum in parts]))
    log_sum = torch.empty(q_THD.shape[:2])
    out = cpu_attention.prefill_attention(
        q_THD,
        keys_GCD,
        values_GCV,
        first=first,
        start=start,
        end=end,
        window=window,
        scale=scale,
        log_sum_TH=log_sum,
        threads=threads or torch.get_num_threads(),
    )
    return out, log_sum


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
