"""What kernels over blocks must compute, in plain torch: the oracle of their tests, and what runs where there are no kernels.

Rows are in ggml's layouts and rounded as ggml's own quantisers round. Legend: R rows (a KV head of a sequence, or of latents a
sequence), H query heads of a row, K segments of a row, T tokens of a segment, D numbers of a key, V of a value, C tokens of a
cache; N what may stand in front.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ktopt.cache.blocks.layout import BlockLayout
from ktopt.weights.ggml_types import BY_NAME

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
GROUP = 32
"""Numbers that share a scale."""
SMALLEST = 2.0**-126
"""The smallest normal float32."""


class _Memory:
    """Bytes of a GPU as torch takes them from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """The bytes at an address of a device's memory, uint8, nothing copied. The caller sees to it that they stay there."""
    if device.type == "cuda":
        return torch.as_tensor(_Memory(address, nbytes), device=device)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _away_from_zero(x: torch.Tensor) -> torch.Tensor:
    """To the nearest whole number, halves away from zero, as C rounds."""
    floor = x.abs().floor()
    return torch.copysign(floor + (2 * (x.abs() - floor)).floor(), x)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scales; 0 where that is infinite: float16 has no such scale, so that its group is all zero."""
    return torch.where(scales.abs() < SMALLEST, 0.0, 1 / scales)


def _with_scales(scales: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Groups (N, groups, bytes) behind their scales (N, groups, 1) in float16, as bytes of a row."""
    return torch.cat([scales.to(torch.float16).view(torch.uint8), numbers.view(torch.uint8)], -1).flatten(-2)


def quantize(numbers_ND: torch.Tensor, kind: str) -> torch.Tensor:
    """Rows as stored bytes, uint8 (N, bytes of a row). Q8_0 has 127 steps to a group's largest magnitude, Q4_0 has -8 there."""
    if kind in DTYPES:
        return numbers_ND.to(DTYPES[kind]).contiguous().view(torch.uint8)
    groups = numbers_ND.float().unflatten(-1, (-1, GROUP))
    if kind == "Q8_0":
        scales = groups.abs().amax(-1, keepdim=True) / 127
        return _with_scales(scales, _away_from_zero(groups * _inverse(scales)).to(torch.int8))
    scales = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    steps = (groups * _inverse(scales) + 8.5).to(torch.uint8).clamp(max=15)
    return _with_scales(scales, steps[..., :16] | steps[..., 16:] << 4)


def dequantize(rows_NB: torch.Tensor, kind: str) -> torch.Tensor:
    """Stored rows as float32 (N, numbers of a row)."""
    if kind in DTYPES:
        return rows_NB.contiguous().view(DTYPES[kind]).float()
    groups = rows_NB.unflatten(-1, (-1, BY_NAME[kind].block_bytes))
    scales = groups[..., :2].contiguous().view(torch.float16).float()
    packed = groups[..., 2:].contiguous()
    if kind == "Q8_0":
        return (packed.view(torch.int8).float() * scales).flatten(-2)
    numbers = torch.cat([packed & 15, packed >> 4], -1).float() - 8
    return (numbers * scales).flatten(-2)


def fits(numbers_ND: torch.Tensor, kind: str) -> bool:
    """Whether the kind can hold all numbers: finite ones where there are scales, and what float16 holds, scales included."""
    largest = torch.finfo(torch.float16).max
    size = numbers_ND.float().abs()
    if kind == "F16":
        return bool((~size.isfinite() | (size <= largest)).all())
    steps = {"Q8_0": 127, "Q4_0": 8}.get(kind)
    return steps is None or bool((size <= largest * steps).all())


def pack(keys_RTD: torch.Tensor, values_RTV: torch.Tensor | None, layout: BlockLayout) -> torch.Tensor:
    """A block of each row, uint8 (R, layout.nbytes); bytes that fill up to 64 are zero."""
    out = torch.zeros(keys_RTD.shape[0], layout.nbytes, dtype=torch.uint8, device=keys_RTD.device)
    keys = quantize(keys_RTD, layout.kind).flatten(1)
    out[:, : keys.shape[1]] = keys
    if values_RTV is not None:
        values = quantize(values_RTV, layout.kind).flatten(1)
        out[:, layout.value_offset : layout.value_offset + values.shape[1]] = values
    return out


def unpack(addresses_RK: torch.Tensor, layout: BlockLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks at these addresses as float32 keys (R, K * T, D) and values (R, K * T, V)."""
    rows, count = addresses_RK.shape
    blocks = [bytes_at(address, layout.nbytes, device) for address in addresses_RK.flatten().tolist()]
    raw = torch.stack(blocks) if blocks else torch.empty(0, layout.nbytes, dtype=torch.uint8, device=device)
    numbers = []
    for offset, row_bytes in ((0, layout.key_row_bytes), (layout.value_offset, layout.value_row_bytes)):
        part = raw[:, offset : offset + layout.tokens * row_bytes].reshape(rows, count * layout.tokens, row_bytes)
        numbers.append(dequantize(part, layout.kind))
    return numbers[0], numbers[1][..., : layout.value_dim]


def masked_attention(
    q_RHD: torch.Tensor, keys_RCD: torch.Tensor, values_RCV: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q @ keys.T * scale) @ values (R, H, V) and the logarithm of each softmax's sum (R, H), over the keys that are `seen`
    (broadcast to (R, H, C)), in the dtype of q. What sees none gives zeros and -inf."""
    scores = (q_RHD @ keys_RCD.to(q_RHD.dtype).transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    log_sum = scores.logsumexp(-1)
    weights = torch.nan_to_num((scores - log_sum[..., None]).exp()) if seen.numel() else scores
    return weights @ values_RCV.to(q_RHD.dtype), log_sum


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One attention over all keys from those over parts of them: outs (N, V) and logarithms of sums (N)."""
    if len(parts) == 2:  # as below, in few steps: a decoding token's
        (first, first_sum), (second, second_sum) = parts
        weight = (second_sum - first_sum).sigmoid().nan_to_num_(0)  # where both see nothing
        return torch.lerp(first, second, weight[..., None]), torch.logaddexp(first_sum, second_sum)
    log_sums = torch.stack([log_sum for _, log_sum in parts])
    total = log_sums.logsumexp(0)
    weights = torch.where(total == float("-inf"), 0.0, (log_sums - total).exp())
    out: Any = sum(weight[..., None] * out for weight, (out, _) in zip(weights, parts, strict=True))
    return out, total
