"""From stored blocks to numbers: GGML's storage types as torch tensors.

Types that models commonly come in have vectorised torch routines below, which write straight into the result; the rest go
through the gguf package. Both work on a few hundred thousand numbers at a time, so that the peak is the result plus one small
piece, and both give exactly what gguf's own dequantiser gives in float32 (tested for every type). Layouts follow ggml-quants.c.

Legend: B blocks; the last dimension of `blocks` is the bytes of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ktopt.weights.ggml_types import BY_NAME
from ktopt.weights.source import WeightError

if TYPE_CHECKING:
    Bytes = np.ndarray[Any, Any]

PIECE_ELEMENTS = 1 << 18
PLAIN = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
IQ4_LEVELS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)


def dequantize_into(out: torch.Tensor, raw: Bytes, kind: str) -> None:
    """Fill `out` (..., columns; its rows contiguous, any floating dtype and device) from `raw`, uint8 (..., bytes of a row).

    A conversion to a narrower dtype rounds the float32 result. Raises WeightError for a type that can't be dequantised.
    """
    if not out.is_contiguous():
        for piece, rows in zip(out, raw, strict=True):
            dequantize_into(piece, rows, kind)
        return
    if kind in PLAIN:
        _convert(out.view(-1), raw.reshape(-1), PLAIN[kind])
    else:
        _dequantize(out.view(-1), raw.reshape(-1, BY_NAME[kind].block_bytes), kind)


def dequantize(raw: Bytes, kind: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """`raw`, uint8 (..., bytes of a row), as a fresh tensor (..., columns) of `dtype` on `device`."""
    item = torch.empty(0, dtype=PLAIN[kind]).element_size() if kind in PLAIN else 0
    columns = raw.shape[-1] // item if item else raw.shape[-1] // BY_NAME[kind].block_bytes * BY_NAME[kind].block_elements
    out = torch.empty(*raw.shape[:-1], columns, dtype=dtype, device=device)
    dequantize_into(out, raw, kind)
    return out


def _convert(out: torch.Tensor, raw: Bytes, stored: torch.dtype) -> None:
    if out.dtype == stored and out.device.type == "cpu":
        np.copyto(out.view(torch.uint8).numpy(), raw)
        return
    item = stored.itemsize
    scratch = torch.empty(min(PIECE_ELEMENTS, out.numel()), dtype=stored)
    for start in range(0, out.numel(), PIECE_ELEMENTS):
        piece = out[start : start + PIECE_ELEMENTS]
        part = scratch[: piece.numel()]
        np.copyto(part.view(torch.uint8).numpy(), raw[start * item : (start + piece.numel()) * item])
        piece.copy_(part)


def _dequantize(out: torch.Tensor, raw: Bytes, kind: str) -> None:
    elements = BY_NAME[kind].block_elements
    step = PIECE_ELEMENTS // elements
    routine = ROUTINES.get(kind) or _through_gguf(kind)
    direct = out.dtype == torch.float32 and out.device.type == "cpu"
    blocks = torch.empty(min(step, raw.shape[0]), raw.shape[1], dtype=torch.uint8)
    numbers = torch.empty(0 if direct else blocks.shape[0] * elements)
    for start in range(0, raw.shape[0], step):
        part = blocks[: min(step, raw.shape[0] - start)]
        np.copyto(part.numpy(), raw[start : start + step])
        piece = out[start * elements : (start + part.shape[0]) * elements]
        into = piece if direct else numbers[: piece.numel()]
        routine(into.view(-1, elements), part)
        if not direct:
            piece.copy_(into)


def _through_gguf(kind: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    from gguf import GGMLQuantizationType, quants

    number = GGMLQuantizationType(BY_NAME[kind].number)

    def routine(out: torch.Tensor, blocks: torch.Tensor) -> None:
        try:
            with np.errstate(all="ignore"):
                np.copyto(out.numpy(), quants.dequantize(blocks.numpy(), number).reshape(out.shape))
        except NotImplementedError:
            raise WeightError(f"the storage type {kind} can't be dequantised") from None

    return routine


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 (B, 1)."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Bytes (B, groups, n) to (B, groups, 2, n): the low halves, then the high halves."""
    return torch.stack((packed & 15, packed >> 4), dim=2)


def _bits_q5(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Five-bit numbers of Q5_0 and Q5_1, uint8 (B, 32): four low bits packed, the fifth in a 32-bit mask at `start`."""
    low = _nibbles(blocks[:, None, start + 4 : start + 20]).view(-1, 32)
    shifts = torch.arange(8, dtype=torch.uint8)
    high = (blocks[:, start : start + 4, None] >> shifts) & 1
    return low | (high.view(-1, 32) << 4)


def _q4_0(out: torch.Tensor, blocks: torch.Tensor) -> None:
    out.view(-1, 1, 2, 16).copy_(_nibbles(blocks[:, None, 2:]))
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(out: torch.Tensor, blocks: torch.Tensor) -> None:
    out.view(-1, 1, 2, 16).copy_(_nibbles(blocks[:, None, 4:]))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(out: torch.Tensor, blocks: torch.Tensor) -> None:
    out.copy_(_bits_q5(blocks, 2)).sub_(16).mul_(_half(blocks, 0))


def _q5_1(out: torch.Tensor, blocks: torch.Tensor) -> None:
    out.copy_(_bits_q5(blocks, 4)).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(out: torch.Tensor, blocks: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _q2_k(out: torch.Tensor, blocks: torch.Tensor) -> None:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    numbers = (blocks[:, 16:80].reshape(-1, 2, 1, 32) >> shifts) & 3
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).float()
    mins = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    sixteen = out.view(-1, 16, 16)
    sixteen.copy_(numbers.view(-1, 16, 16)).mul_(scales[:, :, None]).sub_(mins[:, :, None])


def _q3_k(out: torch.Tensor, blocks: torch.Tensor) -> None:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    low = ((blocks[:, 32:96].reshape(-1, 2, 1, 32) >> shifts) & 3).view(-1, 8, 32)
    high = (blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    packed = blocks[:, 96:108]
    scales = _nibbles(packed[:, None, :8]).view(-1, 16)
    scales |= (((packed[:, None, 8:] >> shifts) & 3) << 4).view(-1, 16)
    factors = _half(blocks, 108) * (scales.float() - 32)
    out.copy_((low | (high << 2)).view(-1, 256)).sub_(4)
    out.view(-1, 16, 16).mul_(factors[:, :, None])


def _scales_k4(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight six-bit scales and eight six-bit minima that Q4_K and Q5_K pack in 12 bytes, float32 (B, 8) each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float(), mins.float()


def _scale_groups(out: torch.Tensor, blocks: torch.Tensor) -> None:
    scales, mins = _scales_k4(blocks[:, 4:16])
    factors, offsets = _half(blocks, 0) * scales, _half(blocks, 2) * mins
    out.view(-1, 8, 32).mul_(factors[:, :, None]).sub_(offsets[:, :, None])


def _q4_k(out: torch.Tensor, blocks: torch.Tensor) -> None:
    out.view(-1, 4, 2, 32).copy_(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)))
    _scale_groups(out, blocks)


def _q5_k(out: torch.Tensor, blocks: torch.Tensor) -> None:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    out.view(-1, 8, 32).copy_(low | (high << 4))
    _scale_groups(out, blocks)


def _q6_k(out: torch.Tensor, blocks: torch.Tensor) -> None:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    factors = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    out.copy_((low | (high << 4)).view(-1, 256)).sub_(32)
    out.view(-1, 16, 16).mul_(factors[:, :, None])


def _iq4_nl(out: torch.Tensor, blocks: torch.Tensor) -> None:
    levels = _nibbles(blocks[:, None, 2:]).view(-1).int()
    torch.index_select(IQ4_LEVELS, 0, levels, out=out.view(-1))
    out.mul_(_half(blocks, 0))


def _iq4_xs(out: torch.Tensor, blocks: torch.Tensor) -> None:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    low = _nibbles(blocks[:, 4:8, None]).view(-1, 8)
    high = ((blocks[:, 2:4, None] >> shifts) & 3).view(-1, 8)
    factors = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    levels = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).view(-1).int()
    torch.index_select(IQ4_LEVELS, 0, levels, out=out.view(-1))
    out.view(-1, 8, 32).mul_(factors[:, :, None])


ROUTINES: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
