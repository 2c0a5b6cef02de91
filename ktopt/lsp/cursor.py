"""Where in a rule file a cursor stands, told from the lines around it: the keys above, the key whose value it is in, the token.

The line that is being typed keeps the file from parsing, so nothing here needs it to. Lines are read by their indentation, as in
YAML's block style; a value that opens with { or [ is read from there to the cursor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ktopt.lsp.text import Text

_LINE = re.compile(
    r"""(?P<lead>[ \t]*(?:-(?:[ \t]+|$))*)"""
    r"""(?:(?P<key>"[^"]*"|'[^']*'|[^\s#'"{}\[\],&*!|>%@`][^#]*?)[ \t]*:(?=[ \t]|$)[ \t]*)?(?P<rest>.*)"""
)
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*")
_FLOW_LINES = 60
"""How far above the cursor a { or [ may stand that is still open."""
_MOST_LINES = 20_000
"""Lines that are read above and below the cursor for the keys beside it."""


@dataclass(frozen=True)
class Level:
    """A key above the cursor ("-" for an item of a list), and the mapping that it stands in: each key there, and its value as
    written, unquoted ("" where that is on lines of its own)."""

    key: str
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cursor:
    """A place in a rule file.

    levels      the keys above, the outermost first
    key         the key whose value holds the cursor; None where it is in a key, or where one could be written
    beside      the keys of the mapping that holds the cursor, and their values
    typed       what stands between the token's start and the cursor
    token       the whole token
    start, end  the token's offsets, within its quotes
    quote       its quotes: ' or " or none
    column      characters before the token on its line, from 0
    """

    levels: tuple[Level, ...]
    key: str | None
    beside: Mapping[str, str]
    typed: str
    token: str
    start: int
    end: int
    quote: str = ""
    column: int = 0

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(level.key for level in self.levels)


@dataclass(frozen=True)
class Line:
    """A line taken apart. Columns count characters from 0; `dashes` are those of "- " before the key; `rest` is what follows the
    key, or all that the line holds where there is none."""

    dashes: tuple[int, ...]
    key: str | None
    column: int
    rest: str
    rest_column: int

    @property
    def first(self) -> int:
        """The column at which the line begins."""
        return self.dashes[0] if self.dashes else self.column

    @property
    def blank(self) -> bool:
        return self.key is None and not self.dashes and (not self.rest or self.rest.startswith("#"))


def read_line(text: str) -> Line:
    found = _LINE.match(text)
    assert found is not None  # every part of the pattern may be empty
    lead = found["lead"]
    dashes = tuple(at for at, c in enumerate(lead) if c == "-")
    return Line(dashes, found["key"], len(lead), found["rest"], found.start("rest"))


def let_lines(text: Text) -> Iterator[tuple[int, Line]]:
    """The entries of a file's `let:`, as far as they can be told from the text: each one's line number, from 0, and the line."""
    inside = False
    for number in range(text.line_count):
        read = read_line(text.line(number))
        if read.blank:
            continue
        if read.column == 0 or read.dashes:
            inside = read.key == "let"
        elif inside and read.key is not None:
            yield number, read


def comment_column(line: str) -> int | None:
    """The column of the # that begins a line's comment."""
    quote = ""
    for at, c in enumerate(line):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'" and (at == 0 or line[at - 1] in " \t[{,:"):
            quote = c
        elif c == "#" and (at == 0 or line[at - 1] in " \t"):
            return at
    return None


def unquoted(value: str) -> str:
    """A scalar as written, without its quotes, and without a comment after it."""
    value = value.strip()
    if value[:1] in ("'", '"'):
        return value[1:].partition(value[0])[0]
    return _COMMENT.sub("", value).strip()


def cursor_at(text: Text, offset: int) -> Cursor | None:
    """The cursor at an offset; None in a comment, behind a token, or in one that takes several lines."""
    found = _cursor_at(text, offset)
    if found is None or not found.start <= offset <= found.end:
        return None
    number = text.position(offset).line
    return found if text.line_starts[number] <= found.start and found.end <= text.line_end(number) else None


def _cursor_at(text: Text, offset: int) -> Cursor | None:
    number = text.position(offset).line
    column = offset - text.line_starts[number]
    line = text.line(number)
    comment = comment_column(line)
    if comment is not None and column > comment:
        return None
    block = _Block(text)
    flow = _open_flow(text, block, number, offset)
    if flow is not None:
        return flow
    read = read_line(line)
    if read.key is not None and column > read.column + len(read.key):
        return _in_value(text, block, number, read, offset) if column >= read.rest_column or not read.rest else None
    return _at_key(text, block, number, read, column)


def _in_value(text: Text, block: _Block, number: int, read: Line, offset: int) -> Cursor | None:
    start = text.line_starts[number]
    token = _scalar(text.text, start + read.rest_column, text.line_end(number)) if read.rest else _Token(offset, offset, "", "")
    if not token.start <= offset <= token.end or text.text[token.start - 1] == ":":
        return None
    levels = block.above(number, read)
    beside = block.beside(number, read.column)
    return token.cursor(levels, unquoted(read.key or ""), beside, offset, start)


def _at_key(text: Text, block: _Block, number: int, read: Line, column: int) -> Cursor | None:
    """A cursor in a key, or where a key or an item could be written; a lone scalar below a key is that key's value."""
    start = text.line_starts[number]
    if read.dashes and column <= read.dashes[-1]:
        return None
    own = read.key if read.key is not None else read.rest
    at = read.column
    if not own.strip() or column < at:
        own, at = "", column
    dashes = tuple(d for d in read.dashes if d < at)
    levels = block.above(number, Line(dashes, None, at, "", at))
    quote = own[:1] if own[:1] in ("'", '"') else ""
    body = own[len(quote) :]
    body = body.partition(quote)[0] if quote else body.rstrip()
    first = start + at + len(quote)
    if column < at + len(quote) and own:
        return None
    cut = min(start + column, first + len(body)) if own else start + column
    if (quote or body[:1] in ("@", "$")) and read.key is None and levels and levels[-1].key != "-":
        parent = levels[-1]
        return Cursor(levels[:-1], parent.key, parent.beside, text.text[first:cut], body, first, first + len(body), quote, at)
    beside = block.beside(number, at)
    return Cursor(levels, None, beside, text.text[first:cut] if own else "", body, first, first + len(body), quote, at)


@dataclass(frozen=True)
class _Token:
    start: int
    end: int
    quote: str
    text: str

    def cursor(self, levels: tuple[Level, ...], key: str | None, beside: Mapping[str, str], offset: int, line_start: int) -> Cursor:
        typed = self.text[: offset - self.start]
        return Cursor(levels, key, beside, typed, self.text, self.start, self.end, self.quote, self.start - line_start)


def _scalar(text: str, start: int, end: int) -> _Token:
    """The scalar that begins at `start`, or after blanks there, and ends by `end`."""
    while start < end and text[start] in " \t\r\n":
        start += 1
    quote = text[start] if start < end and text[start] in "\"'" else ""
    if quote:
        close = text.find(quote, start + 1, end)
        while close > 0 and _is_escaped(text, close, quote, start):
            close = text.find(quote, close + (2 if quote == "'" else 1), end)
        close = end if close < 0 else close
        return _Token(start + 1, close, quote, text[start + 1 : close])
    body = _COMMENT.sub("", text[start:end]).rstrip()
    return _Token(start, start + len(body), "", body)


def _is_escaped(text: str, at: int, quote: str, start: int) -> bool:
    if quote == "'":
        return text.startswith("''", at)
    before = text[start + 1 : at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


@dataclass(frozen=True)
class _Block:
    """Block style, by indentation."""

    text: Text

    def lines(self, numbers: Iterator[int] | range) -> Iterator[tuple[int, Line]]:
        """The lines that hold something."""
        for number in numbers:
            read = read_line(self.text.line(number))
            if not read.blank:
                yield number, read

    def above(self, number: int, read: Line) -> tuple[Level, ...]:
        """The keys and items that a line's key stands in, the outermost first."""
        found = [Level("-") for _ in read.dashes]
        limit, in_list = read.first, bool(read.dashes)
        for n, line in self.lines(range(number - 1, max(-1, number - _MOST_LINES), -1)):
            if not limit and not in_list:
                break
            if line.key is not None and (line.column < limit or (in_list and line.column == limit and not line.dashes)):
                found.append(Level(unquoted(line.key), self.beside(n, line.column)))
            elif not (line.dashes and line.first < limit):
                continue
            found += [Level("-") for _ in line.dashes]
            limit, in_list = line.first, bool(line.dashes)
        return tuple(reversed(found))

    def beside(self, number: int, column: int) -> dict[str, str]:
        """The mapping whose keys stand at a column around a line."""
        before: list[Line] = []
        own = read_line(self.text.line(number))
        above = range(number, max(-1, number - _MOST_LINES), -1)
        for n, line in self.lines(above):
            if line.column < column and n != number:
                break
            if line.key is not None and line.column == column:
                before.append(line)
            if line.dashes and line.dashes[-1] < column:
                break
        after: list[Line] = []
        for _, line in self.lines(range(number + 1, min(self.text.line_count, number + _MOST_LINES))):
            if line.first < column or (own.blank and not before and not after and line.column < column):
                break
            if line.key is not None and line.column == column and not line.dashes:
                after.append(line)
        return {unquoted(line.key or ""): unquoted(line.rest) for line in (*reversed(before), *after)}


@dataclass
class _Frame:
    """An open { or [: the key whose value is being read, where the token began, and the keys read so far."""

    kind: str
    start: int
    key: str | None = None
    entries: dict[str, str] = field(default_factory=dict)


def _open_flow(text: Text, block: _Block, number: int, offset: int) -> Cursor | None:
    """The cursor inside a { or [ that a key's value opens on its line or on one above."""
    for n in range(number, max(-1, number - _FLOW_LINES), -1):
        read = read_line(text.line(n))
        if read.rest[:1] not in ("{", "[") or (read.key is None and not read.dashes and n != 0):
            if n != number and read.key is not None:
                return None
            continue
        begin = text.line_starts[n] + read.rest_column
        frames = _frames(text.text, begin, offset) if begin < offset else []
        if not frames:
            return None
        _rest_of(text.text, frames[-1], offset)
        levels = list(block.above(n, read))
        if read.key is not None:
            levels.append(Level(unquoted(read.key), block.beside(n, read.column)))
        return _in_flow(text, frames, levels, offset)
    return None


def _in_flow(text: Text, frames: list[_Frame], levels: list[Level], offset: int) -> Cursor | None:
    for frame in frames[:-1]:
        levels.append(Level(frame.key or "", frame.entries) if frame.kind == "{" else Level("-"))
    inner = frames[-1]
    if inner.kind == "[":
        levels.append(Level("-"))
    end = offset
    while end < len(text.text) and text.text[end] not in ",}]\n\r" and not text.text.startswith((": ", ":\n", " #"), end):
        end += 1
    token = _scalar(text.text, inner.start, end)
    if token.quote:
        token = _scalar(text.text, inner.start, text.line_end(text.position(offset).line))
    if not token.start <= offset <= token.end:
        if token.text or token.quote:
            return None
        token = _Token(offset, offset, "", "")
    number = text.position(offset).line
    key = inner.key if inner.kind == "{" else None
    return token.cursor(tuple(levels), key, inner.entries, offset, text.line_starts[number])


def _frames(text: str, begin: int, end: int) -> list[_Frame]:
    """The brackets open at `end` of a flow value that begins at `begin`."""
    frames: list[_Frame] = []
    at = begin
    while at < end:
        c = text[at]
        if c in "{[":
            frames.append(_Frame(c, at + 1))
        elif c in "}]":
            if frames:
                frames.pop()
            if not frames:
                return []
        elif c in "\"'" and not text[frames[-1].start : at].strip():
            close = text.find(c, at + 1)
            if close < 0 or close >= end:
                return frames
            at = close
        elif c == "," and frames:
            _finish(text, frames[-1], at)
            frames[-1].start, frames[-1].key = at + 1, None
        elif (
            c == ":" and frames[-1].kind == "{" and frames[-1].key is None and text[at + 1 : at + 2] in (" ", "\t", "\n", "\r", "")
        ):
            frames[-1].key = unquoted(text[frames[-1].start : at])
            frames[-1].start = at + 1
        at += 1
    return frames


def _finish(text: str, frame: _Frame, at: int) -> None:
    """Note the entry that ends at an offset."""
    if frame.kind == "{" and frame.key is not None:
        frame.entries[frame.key] = unquoted(text[frame.start : at])


def _rest_of(text: str, frame: _Frame, offset: int) -> None:
    """Add the keys that a { has after the cursor, up to its end or to what can't be part of it."""
    stop = re.compile(r"[{}\[\]\n]").search(text, offset)
    for part in text[offset : stop.start() if stop else len(text)].split(",")[1:]:
        key, colon, value = part.partition(":")
        if colon and key.strip():
            frame.entries.setdefault(unquoted(key), unquoted(value))
    if frame.key is not None:
        stop_at = re.compile(r"[,}\n]").search(text, offset)
        frame.entries.setdefault(frame.key, unquoted(text[frame.start : stop_at.start() if stop_at else len(text)]))
