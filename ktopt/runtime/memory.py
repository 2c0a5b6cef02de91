"""How much memory a process holds and has held: resident bytes on the CPU, allocated bytes on accelerators."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in what getrusage calls one unit of maxrss."""

_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 512 << 10
"""Blocks from this size on go back to the system when they are freed."""


def return_large_blocks() -> None:
    """Make the C library map large blocks by themselves, so that freeing them gives them back. Left to itself glibc learns from the
    first one freed to keep them, and what a long prompt's layers hold for a moment stays with the process. No effect elsewhere."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def resident_bytes() -> int:
    """What the process has in RAM now, mapped file pages included; its peak where the system doesn't say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that the process has had in RAM since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def peak_own_bytes() -> int:
    """The same since this program was started: on Linux, what getrusage tells a child includes its parent's memory at the fork."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return peak_resident_bytes()


def peak_device_bytes() -> dict[str, int]:
    """The most that torch has allocated on each CUDA device that it used."""
    import torch

    if not torch.cuda.is_available():
        return {}
    peaks = {f"cuda:{index}": torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())}
    return {device: peak for device, peak in peaks.items() if peak}
