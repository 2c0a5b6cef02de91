"""The last lines of a terminal, which are written again as they change; those above them stay and scroll away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from os import terminal_size
from typing import TextIO

from ktopt.chat.markdown import columns_of

_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
"""Between them a terminal that knows synchronized output shows nothing half done."""


def size_of(out: TextIO) -> terminal_size:
    """The size of the terminal that `out` writes to: COLUMNS doesn't change with it."""
    try:
        found = os.get_terminal_size(out.fileno())
    except (OSError, ValueError):
        return shutil.get_terminal_size()
    return found if found.columns and found.lines else shutil.get_terminal_size()


class Region:
    """Lines on `out`, whose size `measure` tells. Only lines that differ are written, all of them at once, so nothing flickers; a
    terminal that became narrower has broken long ones, which is reckoned with."""

    def __init__(self, out: TextIO, measure: Callable[[], terminal_size]) -> None:
        self._out, self._measure = out, measure
        self._lines: list[str] = []
        self._columns, self._open = 0, False

    def show(self, above: Sequence[str], lines: Sequence[str]) -> None:
        """Let `above` stay for good, and `lines` stand below it in the place of those there were."""
        new, columns = [*above, *lines], self._measure().columns
        same = 0
        if columns == self._columns:
            while same < min(len(new), len(self._lines)) and new[same] == self._lines[same]:
                same += 1
        rows = sum(max(1, -(-columns_of(line) // columns)) for line in self._lines[same:])
        if rows or new[same:]:
            hide = "" if self._open else "\x1b[?25l"
            up = f"\x1b[{rows}A" if rows else ""
            body = "".join(f"{line}\x1b[K\n" for line in new[same:])
            self._write(f"{_BEGIN}{hide}\r{up}{body}\x1b[J{_END}")
            self._open = True
        self._lines, self._columns = list(lines), columns

    def close(self) -> None:
        """Leave the lines where they are, and give the cursor back."""
        if self._open:
            self._write("\x1b[?25h")
        self._lines, self._open = [], False

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
