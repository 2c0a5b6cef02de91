"""Pages of a mapped file leave the process's memory once a tensor has been read; the system still caches them."""

from __future__ import annotations

import mmap

PAGE = mmap.PAGESIZE


def drop_pages(data: mmap.mmap, start: int, nbytes: int) -> None:
    """Give back the whole pages of data[start : start + nbytes]. Reading them again is allowed, and maps them anew."""
    advice = getattr(mmap, "MADV_DONTNEED", None)
    first, last = -(-start // PAGE) * PAGE, (start + nbytes) // PAGE * PAGE
    if advice is not None and last > first and not data.closed:
        data.madvise(advice, first, last - first)
