"""Weight files are mapped, and a tensor's pages leave the process's memory once it has been read; the system still caches them."""

from __future__ import annotations

import mmap
from pathlib import Path

from ktopt.weights.source import WeightError

PAGE = mmap.PAGESIZE


def map_file(path: Path, least_bytes: int, what: str) -> mmap.mmap:
    """The whole file, mapped for reading. WeightError where it can't be read, or is too small to be `what`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < least_bytes:
                raise WeightError(f"{path} has {size} bytes, too few for a {what} file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WeightError(f"{path} can't be read: {error.strerror or error}") from None


def drop_pages(data: mmap.mmap, start: int, nbytes: int) -> None:
    """Give back the whole pages of data[start : start + nbytes]. Reading them again is allowed, and maps them anew."""
    advice = getattr(mmap, "MADV_DONTNEED", None)
    first, last = -(-start // PAGE) * PAGE, (start + nbytes) // PAGE * PAGE
    if advice is not None and last > first and not data.closed:
        data.madvise(advice, first, last - first)
