"""Parts of blocks read from files by the CPU kernels: many by one call, verified as they come (block_io.h). Linux reads several
at a time past the page cache without a thread for each.

Legend: S parts of one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktopt.kernels.cpu import _extension, _needed

Ints = NDArray[np.int64]


def reader() -> Callable[..., tuple[int, int]] | None:
    """`read_parts`, or None without the kernels."""
    return read_parts if _extension()[0] is not None else None


def read_parts(
    nbytes: int, layer: int, seed: int, files_S: Ints, blocks_S: Ints, rows_S: Ints, offsets_S: Ints, to_S: Ints,
    expected_S: NDArray[np.uint32], buffer: memoryview | None, piece_bytes: int,
) -> tuple[int, int]:  # fmt: skip
    """Read parts of `nbytes`: of files (descriptors) from offsets, to addresses. All arrays lie in one piece.

    seed      what checksums begin with, before the part's block, layer and row (FileShape.checksum)
    expected  each part's checksum
    buffer    memory from a page on, for reads of files that were opened as direct: so many reads at a time as it has pieces of
              `piece_bytes`, whole pages that hold the parts of a layer. None for other files

    Answers the first part that couldn't be read, and its errno, or -1 where its bytes are others, -2 where the file ends before; -1
    and 0 where all were read.
    Releases the GIL.
    """
    arrays: tuple[NDArray[Any], ...] = (files_S, blocks_S, rows_S, offsets_S, to_S, expected_S)
    if any(len(each) != len(files_S) or not each.flags.c_contiguous for each in arrays):
        raise ValueError("arrays of parts must be as long as one another, and in one piece")
    address, depth = 0, 0
    if buffer is not None:
        address, depth = np.frombuffer(buffer, dtype=np.uint8).ctypes.data, len(buffer) // piece_bytes
    at, error = _needed().read_parts(
        len(files_S), nbytes, layer, seed, *(each.ctypes.data for each in arrays), address, depth, piece_bytes
    )
    return at, error
