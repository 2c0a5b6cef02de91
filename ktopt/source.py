"""Where a thing stands in a text: positions, spans, and YAML nodes that keep them.

Lines and columns count from 1; a span's end is exclusive. `parse.py` makes these nodes from text, `validate.py` reads them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a text: line and column, both from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A stretch of text from `start` up to, not including, `end`."""

    start: Position
    end: Position

    @classmethod
    def at(cls, line: int, column: int, width: int = 1) -> Span:
        return cls(Position(line, column), Position(line, column + width))


FILE_START = Span.at(1, 1, 0)
_BREAK = re.compile(r"\r\n|[\n\r\x85\u2028\u2029]")
"""What ends a line in YAML."""


@dataclass(frozen=True)
class SourceFile:
    """A text and the path that messages name it by ("-" for standard input)."""

    path: str
    text: str

    @cached_property
    def lines(self) -> list[str]:
        """The lines as YAML breaks them, without their breaks; none after a break at the end."""
        found = _BREAK.split(self.text)
        return found if found[-1] else found[:-1]

    @cached_property
    def line_starts(self) -> list[int]:
        """Where each line begins in the text, from 0."""
        return [0, *(found.end() for found in _BREAK.finditer(self.text))]

    def offset(self, position: Position) -> int:
        """Where a position stands in the text, from 0; the end of its line or of the text where it is past that."""
        if position.line > len(self.line_starts):
            return len(self.text)
        start = self.line_starts[position.line - 1]
        end = self.line_starts[position.line] if position.line < len(self.line_starts) else len(self.text)
        return min(start + position.column - 1, end)

    def position(self, offset: int) -> Position:
        """The position of an offset from 0."""
        line = bisect_right(self.line_starts, offset)
        return Position(line, offset - self.line_starts[line - 1] + 1)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a piece of a compiled form was written: a file and a span in it."""

    file: str
    span: Span

    def __str__(self) -> str:
        return f"{self.file}:{self.span.start.line}"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A YAML scalar. `value` is what YAML 1.1 resolves it to; `style` is its quote character, or "" when plain."""

    value: Any
    span: Span
    style: str = ""
    raw: str = ""

    def part(self, offset: int, length: int = 1) -> Span:
        """Where characters of a string value stand in the file, quotes and escapes reckoned with; the whole span where the scalar
        takes several lines."""
        widths = _character_widths(self.raw, self.style)
        if self.span.start.line != self.span.end.line or len(widths) != len(str(self.value)):
            return self.span
        start = self.span.start.column + bool(self.style) + sum(widths[:offset])
        return Span.at(self.span.start.line, start, sum(widths[offset : offset + length]) or 1)


_ESCAPE_WIDTHS = {"x": 4, "u": 6, "U": 10}


def _character_widths(raw: str, style: str) -> list[int]:
    """How many characters of a scalar as written make each character of its value."""
    widths: list[int] = []
    at, end = (1, len(raw) - 1) if style else (0, len(raw))
    while at < end:
        width = 1
        if style == "'" and raw[at] == "'":
            width = 2
        elif style == '"' and raw[at] == "\\":
            width = _ESCAPE_WIDTHS.get(raw[at + 1], 2)
        widths.append(width)
        at += width
    return widths


@dataclass(frozen=True, slots=True)
class Sequence:
    """A YAML list."""

    items: tuple[Node, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Mapping:
    """A YAML mapping, in the order written. Duplicate keys are reported by the parser, which keeps the first."""

    entries: tuple[tuple[Scalar, Node], ...]
    span: Span

    def get(self, key: str) -> Node | None:
        return next((value for name, value in self.entries if name.value == key), None)

    def key(self, key: str) -> Scalar | None:
        return next((name for name, _ in self.entries if name.value == key), None)

    def __iter__(self) -> Iterator[tuple[Scalar, Node]]:
        return iter(self.entries)


Node = Scalar | Sequence | Mapping


@dataclass(frozen=True)
class Document:
    """One parsed rule file: its source, its root node (None when empty or unreadable), and the files that it imports."""

    source: SourceFile
    root: Node | None
    imports: tuple[Document, ...] = field(default=())

    def origin(self, node: Node) -> Origin:
        return Origin(self.source.path, node.span)

    @property
    def sources(self) -> dict[str, SourceFile]:
        """The texts of this file and of all that it imports, by path."""
        found = {self.source.path: self.source}
        for imported in self.imports:
            found |= imported.sources
        return found


def plain(node: Node | None) -> Any:
    """The ordinary Python value of a node."""
    match node:
        case None:
            return None
        case Scalar():
            return node.value
        case Sequence():
            return [plain(item) for item in node.items]
        case Mapping():
            return {key.value: plain(value) for key, value in node.entries}
