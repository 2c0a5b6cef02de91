"""Weights of 4 and 8 bits as torch's own low-bit products take them: quantising, packing, multiplying, reading back.

Legend: M rows of activations, N outputs, K inputs, g weights in a group. Sizes that a product can't take are padded with zeros.
On CUDA and on the CPU the products are different functions of torch with one meaning, so that what runs on a GPU is tested without.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses import FakeTensor
from torch.nn import functional

from ktopt.diagnostics import KtoptError
from ktopt.operators.linear import ROUNDED_AT_A_TIME, padded

OUTPUTS, INPUTS = 16, 128
"""What N and K are padded to multiples of; with 8 bits, K too to multiples of OUTPUTS."""
INNER_TILES = 8
"""How torch's packed layout on CUDA is arranged; it asks for K in multiples of 16 times that."""
FEW_TOKENS = 16
"""Up to so many rows torch's product with 8-bit weights reads them as they are; for more, numbers are made of them first."""
LARGEST_FP8 = 448.0


def pad(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix with zeros below and to the right, up to these multiples."""
    more = (0, padded(matrix.shape[1], columns) - matrix.shape[1], 0, padded(matrix.shape[0], rows) - matrix.shape[0])
    return functional.pad(matrix, more) if any(more) else matrix


def in_pieces(
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], weight_NK: torch.Tensor, scales_dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantize` makes of a weight, by some rows at a time: what it holds for a moment doesn't grow with the weight."""
    found = [quantize(rows) for rows in weight_NK.split(max(1, ROUNDED_AT_A_TIME // weight_NK.shape[1]))]
    return torch.cat([numbers for numbers, _ in found]), torch.cat([scales for _, scales in found], scales_dim)


class Int4:
    """4 bits a weight, a scale and a zero in bfloat16 for each g of a row: weight = (q - 8) * scale + zero, q from 0 to 15.

    A group spans from its least weight to its greatest, so that a weight is off by half a scale at most, a thirtieth of the span,
    beside the rounding of bfloat16. The product is in bfloat16: torch._weight_int4pack_mm.
    """

    GROUPS = (32, 64, 128, 256)
    """Sizes of group that torch's product knows."""

    @staticmethod
    def quantize(weight_NK: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """q uint8 (N, K), and scales and zeros (K/g, N, 2) bfloat16, of a weight whose sizes are padded."""
        return in_pieces(lambda rows: Int4._quantize(rows, group), weight_NK, 1)

    @staticmethod
    def _quantize(weight_NK: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = weight_NK.shape
        groups = weight_NK.float().view(rows, columns // group, group)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-30).bfloat16()
        zero = (low + 8 * scale.float()).bfloat16()
        q = ((groups - zero.float()) / scale.float() + 8).round().clamp(0, 15).to(torch.uint8)
        return q.view(rows, columns), torch.cat([scale, zero], -1).transpose(0, 1).contiguous()

    @staticmethod
    def pack(q_NK: torch.Tensor) -> torch.Tensor:
        """q in the layout that the product wants on its device."""
        if q_NK.device.type == "cpu":
            return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q_NK.int(), 1)  # type: ignore[no-any-return]
        pairs = q_NK[:, ::2] << 4 | q_NK[:, 1::2]
        return torch.ops.aten._convert_weight_to_int4pack(pairs, INNER_TILES)  # type: ignore[no-any-return]

    @staticmethod
    def product(x_MK: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, columns: int) -> torch.Tensor:
        """x (M, K without padding) times the weight: (M, `columns`) bfloat16."""
        wide = padded(x_MK.shape[1], max(INPUTS, group)) - x_MK.shape[1]
        x = functional.pad(x_MK.bfloat16(), (0, wide)) if wide else x_MK.bfloat16()
        of_the_cpu = x.device.type == "cpu" and not isinstance(x, FakeTensor)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu if of_the_cpu else torch.ops.aten._weight_int4pack_mm
        return multiply(x.contiguous(), packed, group, scales)[:, :columns]  # type: ignore[no-any-return]


class Int8:
    """8 bits a weight, a scale in bfloat16 for each output: weight = q * scale, q from -127 to 127. A weight is off by half a scale
    at most, beside the rounding of bfloat16. The product is in bfloat16: torch._weight_int8pack_mm for few rows."""

    @staticmethod
    def quantize(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q int8 (N, K) and scales bfloat16 (N,), of a weight whose sizes are padded."""
        wide = weight_NK.float()
        scale = (wide.abs().amax(-1) / 127).clamp(min=1e-30).bfloat16()
        return (wide / scale.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), scale

    @staticmethod
    def numbers(q_NK: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
        return q_NK.bfloat16() * scale_N.bfloat16().unsqueeze(-1)

    @staticmethod
    def product(x_MK: torch.Tensor, q_NK: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
        """x (M, K without padding) times the weight: (M, N) bfloat16."""
        wide = q_NK.shape[1] - x_MK.shape[1]
        x = functional.pad(x_MK.bfloat16(), (0, wide)) if wide else x_MK.bfloat16()
        if len(x) > FEW_TOKENS:
            return functional.linear(x, Int8.numbers(q_NK, scale_N))
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), q_NK, scale_N.bfloat16())  # type: ignore[no-any-return]


class Float8:
    """8-bit floats (e4m3) with a scale in float32 for each output, times activations in e4m3 with a scale for each row of them:
    torch._scaled_mm. Both are off by a sixteenth at most, but for numbers a 30,000th of the largest, or smaller."""

    @staticmethod
    def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """e4m3 (M, K) and scales float32 (M, 1), of activations or of a weight whose sizes are padded."""
        wide = rows.float()
        scale = (wide.abs().amax(-1, keepdim=True) / LARGEST_FP8).clamp(min=1e-30)
        return (wide / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn), scale

    @staticmethod
    def product(x_MK: torch.Tensor, weight_NK: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
        """x (M, K without padding) times the weight: (M, N) bfloat16."""
        wide = weight_NK.shape[1] - x_MK.shape[1]
        x8, scale_M = Float8.quantize(functional.pad(x_MK, (0, wide)) if wide else x_MK)
        return torch._scaled_mm(x8, weight_NK.t(), scale_a=scale_M, scale_b=scale_N.view(1, -1), out_dtype=torch.bfloat16)


def refuse_older(device: torch.device, least_sm: int, op: str) -> None:
    """KtoptError where a CUDA device of this machine is of an older compute capability than the op runs on."""
    if device.type != "cuda" or not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        return
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < least_sm:
        raise KtoptError(
            f"{op} needs compute capability {least_sm / 10:.1f}, and {device} ({torch.cuda.get_device_name(device)}) has "
            f"{major}.{minor}; name another op for it"
        )
