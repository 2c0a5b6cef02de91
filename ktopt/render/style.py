"""Colour, lines and width of terminal text, and numbers in it."""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.diagnostics import Severity

_CODES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "1;33", "blue": "1;34", "cyan": "1;36"}
SEVERITY_COLOUR = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


@dataclass(frozen=True)
class Style:
    """What text may carry: ANSI colours, and the lines of trees in Unicode."""

    colour: bool = False
    lines: bool = True

    def paint(self, text: str, kind: str) -> str:
        """`text` in bold, dim, red, green, yellow, blue or cyan where colours are on."""
        return f"\x1b[{_CODES[kind]}m{text}\x1b[0m" if self.colour and text else text


PLAIN = Style()


def printable(text: str) -> str:
    """`text` with control characters made visible, so that a hostile file can't drive the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def one_line(text: str) -> str:
    """The same for text that has to stay on its line."""
    return printable(text).replace("\n", "\N{REPLACEMENT CHARACTER}")


def width(text: str) -> int:
    """Terminal columns that `text` takes: two for East Asian wide characters, none for combining marks."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def plural(count: int, noun: str) -> str:
    """ "1 error", "3 errors", "2 infos"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def size(count: float) -> str:
    """Bytes in decimal units: "538.1 MB", "1.3 TB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
