"""Blocks of keys and values, and attention to them where they lie, by the CPU kernels: addresses and sizes go in.

kernels/blocks.py is the caller, and says what is computed. Legend: R rows, H query heads of a row, K segments of a row, T tokens,
D numbers of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ktopt.diagnostics import KtoptError
from ktopt.kernels.cpu import _needed
from ktopt.weights.ggml_types import BY_NAME

if TYPE_CHECKING:
    import torch

    from ktopt.cache.blocks.layout import BlockLayout

KIND_NUMBERS = {
    "torch.float32": BY_NAME["F32"].number,
    "torch.float16": BY_NAME["F16"].number,
    "torch.bfloat16": BY_NAME["BF16"].number,
}

TOO_LARGE = "keys or values have numbers that {} can't hold: keep them as BF16 or F32"

Group = tuple[int, int, int, int, int, int, int, int, int, int]
"""What `attend` takes of segments of one kind: kind number, tokens of each, how many a row; the address of (R, K) addresses of keys
and how many numbers its rows are apart, or 0, 0; addresses of a tensor's first keys and values, or where values are after keys;
bytes from row to row of each; the address of (R, K) hidden tokens, or 0. Numbers of addresses and hidden tokens are int64."""


def _shape(layout: BlockLayout) -> tuple[int, int, int, int, int, int, bool]:
    kind = BY_NAME[layout.kind].number
    return kind, layout.tokens, layout.key_dim, layout.value_dim, layout.value_offset, layout.nbytes, layout.shared


def _rows(tensor_RTD: torch.Tensor) -> tuple[int, int, int, int]:
    """Kind, address, and strides of rows and tokens in bytes."""
    size = tensor_RTD.element_size()
    kind = KIND_NUMBERS[str(tensor_RTD.dtype)]
    return kind, tensor_RTD.data_ptr(), tensor_RTD.stride(0) * size, tensor_RTD.stride(1) * size


def pack(keys_RTD: torch.Tensor, values_RTV: torch.Tensor | None, layout: BlockLayout, out_RN: torch.Tensor, threads: int) -> None:
    """Blocks into `out`, uint8 (R, layout.nbytes), whose rows may lie further apart. The last dimension of keys and values must be
    contiguous. KtoptError where the layout's kind can't hold a number. Releases the GIL."""
    keys = _rows(keys_RTD)
    values = keys if values_RTV is None else _rows(values_RTV)
    fits = _needed().pack_blocks(
        *_shape(layout), len(out_RN), *keys, *values, out_RN.data_ptr(), max(out_RN.stride(0), layout.nbytes), threads
    )
    if not fits:
        raise KtoptError(TOO_LARGE.format(layout.kind))


def unpack(addresses_RK: torch.Tensor, layout: BlockLayout, keys_RCD: torch.Tensor, values_RCV: torch.Tensor, threads: int) -> None:
    """The blocks at these addresses into keys (R, K * T, D) and values (R, K * T, V) of one dtype, each row contiguous. ValueError
    for an address of 0. Releases the GIL."""
    rows, count = addresses_RK.shape
    keys, values = _rows(keys_RCD), _rows(values_RCV)
    _needed().unpack_blocks(
        *_shape(layout), rows, count, addresses_RK.data_ptr(), addresses_RK.stride(0), *keys[:3], *values[1:3], threads
    )


def attend(
    q_RHD: torch.Tensor, groups: Iterable[Group], out_RHV: torch.Tensor, log_sum_RH: torch.Tensor, scale: float, threads: int
) -> None:
    """The attention of each row to all of its segments into `out` and `log_sum`; tensors are float32 and contiguous. ValueError for
    a segment without an address, and for sizes that don't fit. Releases the GIL."""
    rows, heads, key_dim = q_RHD.shape
    numbers = [number for group in groups for number in group]
    addresses = q_RHD.data_ptr(), out_RHV.data_ptr(), log_sum_RH.data_ptr()
    _needed().segment_attention(rows, heads, key_dim, out_RHV.shape[2], *addresses, threads, scale, *numbers)
