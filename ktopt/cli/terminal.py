"""What the terminal can show: colour, width and a progress bar."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any, Self, TextIO

from ktopt.render.style import Style, size

__all__ = ["Progress", "TokenProgress", "columns", "size", "style_of"]


def style_of(stream: TextIO) -> Style:
    """Colour on a terminal only: NO_COLOR turns it off, FORCE_COLOR on; NO_COLOR wins. Lines where the encoding has them."""
    if os.environ.get("NO_COLOR"):
        colour = False
    elif os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        colour = True
    else:
        colour = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Style(colour, _has_lines(stream.encoding))


def _has_lines(encoding: str | None) -> bool:
    """Whether the lines of a tree can be written."""
    try:
        "│├└─".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def columns(stream: TextIO) -> int:
    """Width to lay a table out in: the terminal's, or 100 where output goes to a file."""
    return max(80, shutil.get_terminal_size((100, 24)).columns) if stream.isatty() else 100


class Progress:
    """A bar on stderr while weights load; silent where stderr is no terminal. It is called with events that have `done_bytes` and
    `total_bytes`."""

    def __init__(self, label: str) -> None:
        self.label, self.start, self.last, self.live = label, time.monotonic(), 0.0, sys.stderr.isatty()

    def __call__(self, event: Any) -> None:
        self.show(event.done_bytes, event.total_bytes)

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self.live or (now - self.last < 0.1 and done < total):
            return
        self.last = now
        share = done / total if total else 1.0
        bar = ("█" * round(24 * share)).ljust(24, "░")
        done_of_total = self.numbers(done, total, done / max(now - self.start, 1e-3))
        sys.stderr.write(f"\r{self.label} {bar} {share:>4.0%}  {done_of_total}\x1b[K")
        sys.stderr.flush()

    def numbers(self, done: int, total: int, rate: float) -> str:
        """How far it is, in words; `rate` is a second's."""
        return f"{size(done)} of {size(total)}  {size(rate)}/s"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live and self.last:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class TokenProgress(Progress):
    """The same while a prompt is read: it is called with the tokens read and all of them, and shows what is left to wait for."""

    def __call__(self, done: int, total: int) -> None:  # type: ignore[override]
        self.show(done, total)

    def numbers(self, done: int, total: int, rate: float) -> str:
        return f"{done:,} of {total:,} tokens  {rate:,.0f} tokens/s  {max(0, total - done) / max(rate, 1e-3):.0f} s left"
