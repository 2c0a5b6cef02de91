"""Reads calls of tools out of a model's text while it comes. What may be the beginning of a call is held back; arguments are handed
on as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ktopt.server.template import PROBE
from ktopt.server.tools.formats import FORMATS, Format

MOST_HEADER_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """Call number `index` is one of the tool `name`."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of call `index`'s arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnds:
    """The arguments of call `index` are complete."""

    index: int


Delta = Content | CallBegins | CallArguments | CallEnds


class _State(Enum):
    CONTENT = auto()
    HEADER = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    BETWEEN = auto()


class CallReader:
    """Takes an answer's text in pieces; gives what it is."""

    def __init__(self, form: Format) -> None:
        self.form = form
        self.calls = 0
        self._state = _State.CONTENT
        self._text = ""
        self._opening = ""
        self._started = False
        self._value = _Value()

    def feed(self, text: str) -> list[Delta]:
        """What is known after this piece."""
        self._text += text
        return list(self._read())

    def end(self) -> list[Delta]:
        """What is left when the answer has ended."""
        if self._state is _State.HEADER:
            return list(self._without_header(self._take(), ""))
        if self._state is _State.CONTENT and self._text and not (self.calls and self._text.isspace()):
            return [Content(self._take())]
        if self._state is _State.ARGUMENTS:
            self._state = _State.TAIL
        return []

    def _take(self) -> str:
        taken, self._text = self._text, ""
        return taken

    def _read(self) -> Iterator[Delta]:
        while True:
            before = (self._state, len(self._text))
            match self._state:
                case _State.CONTENT:
                    yield from self._content()
                case _State.HEADER:
                    yield from self._header()
                case _State.ARGUMENTS:
                    yield from self._arguments()
                case _State.TAIL:
                    self._tail()
                case _State.BETWEEN:
                    self._between()
            if (self._state, len(self._text)) == before:
                return

    def _content(self) -> Iterator[Delta]:
        if not self.form.opens and not self._started and self._text.lstrip().startswith("{"):
            self._open("")
            return
        found = [(self._text.find(marker), marker) for marker in self.form.markers if marker in self._text]
        if found:
            place, marker = min(found)
            yield from self._content_until(place, before_call=True)
            self._text = self._text.removeprefix(marker)
            if marker == self.form.opens or not self.form.opens:
                self._open(marker)
            return
        yield from self._content_until(len(self._text) - self._held())

    def _content_until(self, place: int, before_call: bool = False) -> Iterator[Delta]:
        """Give content up to a place; white space before a call is none, so it waits for what follows it."""
        text, rest = self._text[:place], self._text[place:]
        kept = text.rstrip()
        if before_call:
            self._text = rest
        else:
            self._text = text[len(kept) :] + rest
        if kept:
            self._started = True
            yield Content(kept)

    def _held(self) -> int:
        """How many of the last characters may be the beginning of a marker."""
        most = max((len(marker) for marker in self.form.markers), default=1) - 1
        for count in range(min(most, len(self._text)), 0, -1):
            if any(marker.startswith(self._text[-count:]) for marker in self.form.markers):
                return count
        return 0

    def _open(self, marker: str) -> None:
        self._opening, self._state, self._started = marker, _State.HEADER, True

    def _header(self) -> Iterator[Delta]:
        found = self.form.header.match(self._text)
        if found:
            self._text = self._text[found.end() :]
            name = next(group for group in found.groups() if group is not None)
            self._state, self._value = _State.ARGUMENTS, _Value()
            yield CallBegins(self.calls, _unescaped(name))
            return
        closes = self.form.closes
        if not self.form.repeats and closes and closes in self._text:
            inside, _, self._text = self._text.partition(closes)
            yield from self._without_header(inside, closes)
        elif len(self._text) > MOST_HEADER_CHARACTERS:
            yield from self._without_header(self._take(), "")

    def _without_header(self, text: str, closes: str) -> Iterator[Delta]:
        """Text where a call was expected: JSON of one in another order of its keys, or content."""
        self._state = _State.CONTENT
        calls = _calls_of(text)
        if not calls:
            yield Content(self._opening + text + closes)
        for name, arguments in calls:
            yield CallBegins(self.calls, name)
            yield CallArguments(self.calls, json.dumps(arguments, ensure_ascii=False))
            yield CallEnds(self.calls)
            self.calls += 1

    def _arguments(self) -> Iterator[Delta]:
        count = self._value.read(self._text)
        taken, self._text = self._text[:count], self._text[count:]
        if taken:
            yield CallArguments(self.calls, taken)
        if self._value.complete:
            yield CallEnds(self.calls)
            self.calls += 1
            self._state = _State.TAIL if self.form.closes else _State.CONTENT

    def _tail(self) -> None:
        ends = [(self._text.find(mark), mark) for mark in (self.form.closes, self.form.opens) if mark and mark in self._text]
        if not ends:
            return
        place, mark = min(ends)
        if mark == self.form.closes:
            place += len(mark)
        self._text = self._text[place:]
        self._state = _State.BETWEEN if self.form.repeats else _State.CONTENT

    def _between(self) -> None:
        """After a call, where another may follow at once."""
        rest = self._text.lstrip(" \t\r\n,;")
        if not rest:
            return
        if rest.startswith("{"):
            self._text, self._state = rest, _State.HEADER
        else:
            self._text, self._state = rest.removeprefix("]"), _State.CONTENT


class _Value:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._in_string = self._escaped = False

    def read(self, text: str) -> int:
        """How many of these characters still belong to it."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return place + 1
        return len(text)


def _unescaped(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name


def _calls_of(text: str) -> list[tuple[str, Any]]:
    """The calls that a JSON text holds, or none where it is something else."""
    try:
        value = json.loads(text.strip())
    except (ValueError, RecursionError):
        return []
    calls = []
    for call in value if isinstance(value, list) else [value]:
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return []
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return []
        calls.append((call["name"], arguments))
    return calls


def form_of(call: str) -> Format | None:
    """The form that reads what a chat template made of a call; None where none does."""
    for form in FORMATS:
        reader = CallReader(form)
        deltas = [*reader.feed(call), *reader.end()]
        if any(isinstance(delta, CallBegins) and delta.name == PROBE for delta in deltas):
            return form
    return None
