"""A text as an editor sees it: its lines and columns, and edits to it.

An editor's lines end at \\n, \\r\\n or \\r alone, and count from 0; its columns count UTF-16 code units, unless both sides agree on
another encoding. ktopt's lines also end where YAML 1.1 ends them (NEL, LS, PS), they count from 1, and columns are characters. One
never stands for the other: both go by the offset in the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

from lsprotocol import types

from ktopt.source import SourceFile, Span

_BREAK = re.compile(r"\r\n|\n|\r")
BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Text:
    """A text and how its columns are counted: "utf-16", "utf-8" or "utf-32"."""

    text: str
    encoding: str = "utf-16"

    @cached_property
    def line_starts(self) -> list[int]:
        """Where each line begins, from 0."""
        return [0, *(found.end() for found in _BREAK.finditer(self.text))]

    @property
    def line_count(self) -> int:
        return len(self.line_starts)

    def line(self, number: int) -> str:
        """A line without its end; "" past the last."""
        if not 0 <= number < len(self.line_starts):
            return ""
        return self.text[self.line_starts[number] : self.line_end(number)]

    def line_end(self, number: int) -> int:
        """The offset at which a line's text ends."""
        if number + 1 >= len(self.line_starts):
            return len(self.text)
        end = self.line_starts[number + 1]
        return end - (2 if self.text.startswith("\r\n", end - 2) else 1)

    def offset(self, position: types.Position) -> int:
        """The offset of a position; the end of the line, or of the text, where it lies past that. Within a character, its start."""
        if position.line >= len(self.line_starts):
            return len(self.text)
        line = self.line(position.line)
        return self.line_starts[position.line] + self._characters(line, position.character)

    def position(self, offset: int) -> types.Position:
        """The position of an offset."""
        offset = min(max(offset, 0), len(self.text))
        number = bisect_right(self.line_starts, offset) - 1
        start = self.line_starts[number]
        return types.Position(number, self._units(self.text[start : min(offset, self.line_end(number))]))

    def range(self, start: int, end: int) -> types.Range:
        return types.Range(self.position(start), self.position(max(start, end)))

    def changed(self, change: types.TextDocumentContentChangeEvent) -> Text:
        """The text after an edit. One without a range replaces it all."""
        where = getattr(change, "range", None)
        if where is None:
            return replace(self, text=change.text)
        start, end = sorted((self.offset(where.start), self.offset(where.end)))
        return replace(self, text=self.text[:start] + change.text + self.text[end:])

    def _units(self, text: str) -> int:
        if self.encoding == "utf-32" or text.isascii():
            return len(text)
        if self.encoding == "utf-8":
            return len(text.encode("utf-8", "surrogatepass"))
        return len(text.encode("utf-16-le", "surrogatepass")) // 2

    def _characters(self, line: str, units: int) -> int:
        """How many whole characters of a line lie within so many units."""
        if self.encoding == "utf-32" or line.isascii():
            return min(units, len(line))
        for at, character in enumerate(line):
            units -= self._units(character)
            if units < 0:
                return at
        return len(line)


@dataclass(frozen=True)
class Shown:
    """A rule file's source as the compiler has it, beside the text that the editor shows: spans of one are ranges of the other."""

    text: Text
    source: SourceFile

    @classmethod
    def of(cls, text: Text, path: str) -> Shown:
        """The source of an editor's text. A byte order mark is the editor's own business, as it is of a file's reader."""
        return cls(text, SourceFile(path, text.text.removeprefix(BYTE_ORDER_MARK)))

    @property
    def shift(self) -> int:
        """Characters that the editor's text has before the source begins."""
        return len(self.text.text) - len(self.source.text)

    def range(self, span: Span) -> types.Range:
        """A span as the editor's range."""
        start, end = self.source.offset(span.start), self.source.offset(span.end)
        return self.text.range(start + self.shift, end + self.shift)

    def source_offset(self, position: types.Position) -> int:
        """An editor's position as an offset in the source."""
        return max(0, self.text.offset(position) - self.shift)

    def line_of(self, position: types.Position) -> int:
        """The source's line, from 1, in which an editor's position lies."""
        return self.source.position(self.source_offset(position)).line
