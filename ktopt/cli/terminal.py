"""What the terminal can show: colour, width, byte counts and a progress bar."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any, TextIO

from ktopt.render.style import Style


def style_of(stream: TextIO) -> Style:
    """Colour on a terminal only. NO_COLOR turns it off, FORCE_COLOR on; NO_COLOR wins."""
    if os.environ.get("NO_COLOR"):
        return Style()
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return Style(colour=True)
    return Style(colour=stream.isatty() and os.environ.get("TERM") != "dumb")


def columns(stream: TextIO) -> int:
    """Width to lay a table out in: the terminal's, or 100 where output goes to a file."""
    return max(80, shutil.get_terminal_size((100, 24)).columns) if stream.isatty() else 100


def size(count: float) -> str:
    """Bytes in decimal units: "538.1 MB", "1.3 TB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


class Progress:
    """A bar on stderr while weights load; silent where stderr is no terminal. It is called with events that have `done_bytes` and
    `total_bytes`."""

    def __init__(self, label: str) -> None:
        self.label, self.start, self.last, self.live = label, time.monotonic(), 0.0, sys.stderr.isatty()

    def __call__(self, event: Any) -> None:
        now = time.monotonic()
        done, total = event.done_bytes, event.total_bytes
        if not self.live or (now - self.last < 0.1 and done < total):
            return
        self.last = now
        share = done / total if total else 1.0
        bar = ("█" * round(24 * share)).ljust(24, "░")
        rate = size(done / max(now - self.start, 1e-3)) + "/s"
        sys.stderr.write(f"\r{self.label} {bar} {share:>4.0%}  {size(done)} of {size(total)}  {rate}\x1b[K")
        sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live and self.last:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
