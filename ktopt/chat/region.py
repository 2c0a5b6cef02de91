"""The last lines of a terminal, which are written again as they change; those above them stay and scroll away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from os import terminal_size
from typing import TextIO

from ktopt.chat.markdown import columns_of, most_columns_of

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
    terminal that became narrower has broken long ones, which is reckoned with.

    Terminals don't agree on how wide some characters are. So lines that will be written again aren't broken by the terminal, and
    each is a row; one that stays is written once more where it may be wider than it seems.
    """

    def __init__(self, out: TextIO, measure: Callable[[], terminal_size]) -> None:
        self._out, self._measure = out, measure
        self._lines: list[str] = []
        self._columns, self._open = 0, False

    def show(self, above: Sequence[str], lines: Sequence[str]) -> None:
        """Let `above` stay for good, and `lines` stand below it in the place of those there were."""
        columns = self._measure().columns
        same = self._unchanged(above, lines, columns) if columns == self._columns else 0
        rows = sum(max(1, -(-columns_of(line) // columns)) for line in self._lines[same:])
        stay, again = above[same:], lines[max(0, same - len(above)) :]
        if rows or stay or again:
            hide = "" if self._open else "\x1b[?25l"
            up = f"\x1b[{rows}A" if rows else ""
            body = f"{_rows(stay)}\x1b[?7l{_rows(again)}\x1b[?7h"
            self._write(f"{_BEGIN}{hide}\r{up}{body}\x1b[J{_END}")
            self._open = True
        self._lines, self._columns = list(lines), columns

    def _unchanged(self, above: Sequence[str], lines: Sequence[str], columns: int) -> int:
        """How many lines needn't be written again."""
        new = [*above, *lines]
        for number, (old, line) in enumerate(zip(self._lines, new, strict=False)):
            if old != line or (number < len(above) and most_columns_of(line) > columns):
                return number
        return min(len(self._lines), len(new))

    def close(self) -> None:
        """Leave the lines where they are, and give the cursor back."""
        if self._open:
            self._write("\x1b[?25h")
        self._lines, self._open = [], False

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _rows(lines: Sequence[str]) -> str:
    return "".join(f"{line}\x1b[K\n" for line in lines)
