"""A rule file's text as a tree that keeps its comments: what `fmt` writes anew, and where `migrate` finds what an author said.

PyYAML's events say where each scalar and bracket stands; between two of them lie blanks, indicators and comments. A comment on a
line of its own belongs to what follows it, unless it is indented as what precedes it; one at the end of a line belongs there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from ktopt.source import SourceFile

BREAK = re.compile(r"\r\n|[\n\r\x85\u2028\u2029]")
STANDARD = "tag:yaml.org,2002:"


@dataclass(slots=True, eq=False)
class Leaf:
    """A scalar or an alias.

    text    a scalar's text without quotes and escapes; an alias' name
    kind    what YAML takes it for: str, bool, null, other (numbers, dates), or alias
    style   its quote character, | or > of a block, or "" when plain
    raw     it as written, without anchor and tag
    prefix  its anchor and tag as written before it, or ""
    """

    text: str
    kind: str
    style: str = ""
    raw: str = ""
    prefix: str = ""


@dataclass(slots=True, eq=False)
class Member:
    """An entry of a mapping, or an item of a list (no key).

    above   comments on lines of their own before it; "" stands for a blank line between them
    beside  comments at the end of its line
    spaced  whether a blank line stands before it and its comments
    line    the line that it begins on, from 1
    """

    key: Leaf | None = None
    value: Leaf | Collection | None = None
    above: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    spaced: bool = False
    line: int = 0


@dataclass(slots=True, eq=False)
class Collection:
    """A mapping or a list. `below` holds the comments after its last member."""

    mapping: bool
    flow: bool
    prefix: str = ""
    column: int = 0
    members: list[Member] = field(default_factory=list)
    below: list[str] = field(default_factory=list)

    def get(self, key: str) -> Member | None:
        """The entry of that key in a mapping."""
        return next((m for m in self.members if m.key is not None and m.key.text == key), None)

    def leaves(self) -> Iterator[Leaf]:
        """Every scalar and alias inside, keys too."""
        for member in self.members:
            if member.key is not None:
                yield member.key
            if isinstance(member.value, Collection):
                yield from member.value.leaves()
            elif member.value is not None:
                yield member.value

    def comments(self) -> Iterator[str]:
        """Every comment inside, in no particular order."""
        yield from self.below
        for member in self.members:
            yield from member.above
            yield from member.beside
            if isinstance(member.value, Collection):
                yield from member.value.comments()


@dataclass(slots=True, eq=False)
class Commented:
    """A document: its root (None where it has none), and comments that belong to no node."""

    root: Collection | Leaf | None = None
    loose: list[str] = field(default_factory=list)

    def comments(self) -> list[str]:
        """All its comments, sorted; blank lines left out."""
        inside = self.root.comments() if isinstance(self.root, Collection) else ()
        return sorted(text for text in (*self.loose, *inside) if text)


def read_commented(source: SourceFile) -> Commented:
    """The tree of a text that `ktopt.parse.compose` could read."""
    return _Builder(source.text).run()


class _Builder:
    def __init__(self, text: str) -> None:
        self.text = text
        self.resolver: Any = yaml.resolver.Resolver()
        self.document = Commented()
        self.stack: list[Collection] = []
        self.owner: Member | None = None
        self.pending: list[tuple[int, str]] = []

    def run(self) -> Commented:
        events = list(yaml.parse(self.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        gaps = dict(_gaps(events, len(self.text)))
        for i, event in enumerate(events):
            if i in gaps:
                self.gap(*gaps[i])
            if isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent)):
                leaf = self.leaf(event)
                self.put(leaf, event)
                self.header(leaf)
            elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                self.open(event)
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                self.close()
        self.document.loose += [text for _, text in self.pending]
        return self.document

    def leaf(self, event: Any) -> Leaf:
        written = self.text[event.start_mark.index : event.end_mark.index]
        if isinstance(event, yaml.AliasEvent):
            return Leaf(str(event.anchor), "alias", "", written)
        prefix = _prefix(event)
        raw = re.sub(r"^(?:[&!]\S*\s+)+|^[&!]\S*$", "", written) if prefix else written
        tag = event.tag
        if tag is None and not event.style:
            tag = self.resolver.resolve(yaml.ScalarNode, event.value, (True, False))
        kind = {None: "str", "str": "str", "bool": "bool", "null": "null", "merge": "str"}.get(tag and tag.removeprefix(STANDARD))
        return Leaf(event.value, kind or "other", event.style or "", raw, prefix)

    def header(self, leaf: Leaf) -> None:
        """Take the comment behind a block scalar's | or >."""
        if leaf.style in ("|", ">") and self.owner is not None:
            found = re.match(r"[|>][-+0-9]*[ \t]*(#[^\n\r]*)", leaf.raw)
            if found:
                self.owner.beside.append(found[1].rstrip())

    def open(self, event: Any) -> None:
        mark = event.start_mark
        collection = Collection(
            isinstance(event, yaml.MappingStartEvent), bool(event.flow_style), _prefix(event), -1 if event.anchor else mark.column
        )
        self.put(collection, event)
        self.stack.append(collection)

    def close(self) -> None:
        done = self.stack.pop()
        if done.flow:
            done.below = [text for _, text in self.pending]
            self.pending = []
            self.owner = self.stack[-1].members[-1] if self.stack else None
            return
        parent = self.stack[-1] if self.stack else None
        least = done.column + (parent is not None and parent.mapping and not done.mapping and parent.column == done.column)
        count = 0
        for at, (column, text) in enumerate(self.pending):
            if text and column < least:
                break
            if text:
                count = at + 1
        done.below = [text for _, text in self.pending[:count]]
        self.pending = self.pending[count:]

    def put(self, node: Leaf | Collection, event: Any) -> None:
        if not self.stack:
            self.document.root = node
            return
        top = self.stack[-1]
        if top.mapping and top.members and top.members[-1].value is None:
            member = top.members[-1]
            member.value = node
            if isinstance(node, Leaf):
                member.above += [text for _, text in self.pending if text]
                self.pending = []
        else:
            member = self.begin(event)
            if top.column < 0:
                top.column = event.start_mark.column - (0 if top.mapping else 2)
            top.members.append(member)
            if top.mapping:
                assert isinstance(node, Leaf)
                member.key = node
            else:
                member.value = node
        self.owner = member

    def begin(self, event: Any) -> Member:
        texts = [text for _, text in self.pending]
        self.pending = []
        spaced = bool(texts) and not texts[0]
        return Member(above=texts[1:] if spaced else texts, spaced=spaced, line=event.start_mark.line + 1)

    def gap(self, start: int, end: int) -> None:
        """Take the comments between two tokens. A blank line is noted as an empty comment, several as one."""
        first, *lines = BREAK.split(self.text[start:end])
        if self.owner is None or BREAK.match(self.text, start - 1):
            lines.insert(0, first)  # the text's first line, or the one after a block scalar
        elif "#" in first:
            self.owner.beside.append(first[first.index("#") :].rstrip())
        for number, line in enumerate(lines):
            if "#" in line:
                column = len(line) - len(line.lstrip())
                self.pending.append((column, line[line.index("#") :].rstrip()))
            elif not line.strip() and number < len(lines) - 1 and (not self.pending or self.pending[-1][1]):
                self.pending.append((0, ""))


def _gaps(events: list[Any], length: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Where text between tokens lies: the index of the first event after a token, with start and end of what follows it."""
    first, last, flows = 0, 0, []
    for i, event in enumerate(events):
        shows = isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent, yaml.StreamEndEvent))
        if isinstance(event, yaml.CollectionStartEvent):
            flows.append(event.flow_style)
            shows = bool(event.flow_style)
        elif isinstance(event, yaml.CollectionEndEvent):
            shows = bool(flows.pop())
        if shows:
            at = length if isinstance(event, yaml.StreamEndEvent) else event.start_mark.index
            if at > last or first == 0:
                yield first, (last, at)
            first, last = i + 1, event.end_mark.index


def _prefix(event: Any) -> str:
    """An event's anchor and tag as they are written, with a blank after them; "" for none."""
    parts = [f"&{event.anchor}"] if event.anchor else []
    if event.tag:
        parts.append(event.tag.replace(STANDARD, "!!"))
    return " ".join(parts)
