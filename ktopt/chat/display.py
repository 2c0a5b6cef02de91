"""An answer on its way to the reader: drawn as Markdown on a terminal, written as it comes elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from os import terminal_size
from typing import Protocol, TextIO

from rich.console import Console
from rich.theme import Theme

from ktopt.chat.markdown import Block, blocks_of, characters_of, lines_of
from ktopt.chat.region import Region, size_of
from ktopt.chat.safety import shown
from ktopt.render.style import Style

SOONEST_S, LATEST_S = 1 / 20, 1.0
"""How long a drawing waits after the one before: ten times what that took, within these."""
READING_S = 0.4
"""A prompt that is read for longer shows how far it is."""
LEAST_COLUMNS = 10
THEME = Theme({"markdown.code": "bold cyan"})
"""Inline code without a background, which a light terminal hasn't either."""


class Display(Protocol):
    """Where an answer is shown."""

    def reading(self, done: int, total: int) -> None:
        """So many tokens of the prompt have been read."""

    def add(self, text: str) -> None:
        """More of the answer."""

    def catch_up(self) -> float | None:
        """Show what is due; the seconds until more is, None where nothing waits."""

    def close(self) -> None:
        """The answer has ended: show all of it."""


class PlainDisplay:
    """Writes the text as it comes, and ends it with a line break."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._last = out, "\n"

    def reading(self, done: int, total: int) -> None:
        """Nothing is written that isn't the answer."""

    def add(self, text: str) -> None:
        if text := shown(text):
            self._out.write(text)
            self._out.flush()
            self._last = text[-1]

    def catch_up(self) -> float | None:
        return None

    def close(self) -> None:
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()
        self._last = "\n"


class MarkdownDisplay:
    """Draws Markdown as it comes.

    A block of it is final when the next has begun, and is then printed for good. The last one is drawn again as it grows; when it
    is higher than the terminal, its first lines become final too, except a table's, of which the end is shown until all is there.
    """

    def __init__(
        self,
        out: TextIO,
        style: Style,
        measure: Callable[[], terminal_size] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        measure = measure or partial(size_of, out)
        self._region, self._measure, self._clock, self._style = Region(out, measure), measure, clock, style
        self._console = Console(file=out, force_terminal=True, no_color=not style.colour, theme=THEME, highlight=False)
        self._text = ""  # from the first block on that isn't final
        self._begun = False  # whether a block has been printed
        self._fixed = self._fixed_characters = self._width = 0  # of the first block: what is final of it, at that width
        self._start, self._last, self._delay, self._due = clock(), 0.0, SOONEST_S, False

    def reading(self, done: int, total: int) -> None:
        if not self._text and not self._begun and done < total and self._clock() - self._start > READING_S:
            self._region.show([], [self._style.paint(f"reading: {done:,} of {total:,} tokens", "dim")])

    def add(self, text: str) -> None:
        self._text += shown(text)
        self._due = True
        self.catch_up()

    def catch_up(self) -> float | None:
        if not self._due:
            return None
        now = self._clock()
        if (left := self._last + self._delay - now) > 0:
            return left
        self._draw()
        self._last = self._clock()
        self._delay = min(max(SOONEST_S, 10 * (self._last - now)), LATEST_S)
        return None

    def close(self) -> None:
        self._draw(last=True)
        self._region.close()

    def _draw(self, last: bool = False) -> None:
        size = self._measure()
        width = max(LEAST_COLUMNS, size.columns - 1)  # a line that fills the terminal may be broken by it
        above = self._finish_blocks(width, last)
        blocks = [] if last else blocks_of(self._text)
        lines = self._lines(blocks, width)
        if (over := len(lines) - max(1, size.lines - 2)) > 0:
            if not any(block.changes_above for block in blocks):
                above += lines[:over]
                self._fixed += over
                self._fixed_characters += sum(map(characters_of, lines[:over]))
            lines = lines[over:]
        self._region.show(above, lines)
        self._due = False

    def _finish_blocks(self, width: int, last: bool) -> list[str]:
        """The lines of blocks that are final, which are taken off the text. A line that isn't complete decides nothing: it may
        turn out to belong to the block before."""
        blocks = blocks_of(self._text if last else self._text[: self._text.rfind("\n") + 1])
        final = blocks if last else blocks[:-1]
        if not final:
            return []
        lines = self._lines(final, width)
        self._text = "" if last else "\n".join(self._text.split("\n")[blocks[-1].line :])
        self._begun = self._begun or bool(lines or self._fixed)
        self._fixed = self._fixed_characters = 0
        return lines

    def _lines(self, blocks: list[Block], width: int) -> list[str]:
        """What isn't final yet of the lines of these blocks, of which the first is the text's."""
        lines: list[str] = []
        for block in blocks:
            drawn = lines_of(block, self._console, width)
            lines += ["", *drawn] if drawn and (lines or self._begun) else drawn
        if width != self._width:  # lines are broken otherwise: those are final of which all characters were shown
            self._width, found, characters = width, 0, 0
            while self._fixed and found < len(lines):
                if (more := characters + characters_of(lines[found])) > self._fixed_characters:
                    break
                found, characters = found + 1, more
            self._fixed, self._fixed_characters = found, characters
        return lines[self._fixed :]
