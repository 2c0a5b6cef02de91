"""Open files, a bounded number of them: the least recently used is closed for the next."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable


class Handle:
    """A file descriptor that is closed when nobody refers to its handle any more. Who uses it holds the handle meanwhile, not the
    number alone: that may be another file's by then."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Handles:
    """Of the files of a folder, by key; `open_file` opens one. For several threads."""

    def __init__(self, most: int, open_file: Callable[[int, bool], int]) -> None:
        self._most = most
        self._open_file = open_file
        self._open: OrderedDict[tuple[int, bool], Handle] = OrderedDict()
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, block: int, direct: bool) -> Handle:
        """A block's file, opened for direct reads or for all else. OSError where it can't be opened."""
        key = (block, direct)
        with self.lock:
            handle = self._open.get(key)
            if handle is None:
                handle = self._open[key] = Handle(self._open_file(block, direct))
                if len(self._open) > self._most:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(key)
            return handle

    def forget(self, block: int) -> None:
        with self.lock:
            for direct in (False, True):
                self._open.pop((block, direct), None)

    def close(self) -> None:
        with self.lock:
            self._open.clear()
