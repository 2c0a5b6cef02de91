"""Huge pages for memory that is read here and there: a cache of gigabytes in pages of 4 KiB costs a look into the page table for
nearly every block that a token attends to.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HUGE_BYTES = 2 << 20
LEAST_BYTES = 8 << 20
"""Smaller memory isn't worth rounding up."""


def ask_for_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, new and not written to yet. Where it lies on a Linux machine's CPU and is large, the system is asked to back
    what will be written of it by huge pages; where that isn't to be had, nothing changes."""
    advise = _madvise()
    if advise is not None and tensor.device.type == "cpu" and tensor.nbytes >= LEAST_BYTES:
        begin = -(-tensor.data_ptr() // HUGE_BYTES) * HUGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // HUGE_BYTES * HUGE_BYTES
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return tensor


@cache
def _madvise() -> Any:
    """The C library's function, or None where there is none, or no such advice."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
