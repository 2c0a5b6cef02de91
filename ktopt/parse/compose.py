"""YAML events to nodes that keep their places: the composer that `parse` drives.

PyYAML scans (its C scanner where it is built in) and this file builds ktopt.source nodes from the events with a stack, not by
recursion. Nothing is constructed but numbers, strings, booleans, dates and null. What a hostile file could do is bounded: depth,
the number of nodes (each use of an alias counts as all that it stands for), and the length of what is read as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from ktopt.diagnostics import Report
from ktopt.parse.errors import escape_fix, explain
from ktopt.source import Mapping, Node, Origin, Position, Scalar, Sequence, SourceFile, Span

MAX_DEPTH = 100
MAX_NODES = 30_000
MAX_NUMBER_CHARS = 400
"""A longer plain scalar is text: base-60 integers take quadratic time to read."""

STANDARD = "tag:yaml.org,2002:"
SCALAR_TAGS = {STANDARD + name for name in ("str", "int", "float", "bool", "null")}
COLLECTION_TAGS = {"seq": {None, "!", STANDARD + "seq"}, "map": {None, "!", STANDARD + "map"}}


@dataclass
class Budget:
    """What all files of one run may use together."""

    nodes: int = MAX_NODES

    def spend(self, nodes: int) -> bool:
        self.nodes -= nodes
        return self.nodes >= 0


class Unreadable(Exception):
    """Stops composing; what is wrong is in the report."""


@dataclass(slots=True)
class _Open:
    """A collection whose end hasn't been read. `size` counts nodes inside, aliases expanded; `key` waits for its value."""

    kind: str
    start: Position
    flow: bool
    anchor: str | None
    size: int = 1
    items: list[Node] = field(default_factory=list)
    entries: list[tuple[Scalar, Node]] = field(default_factory=list)
    seen: dict[Any, Scalar] = field(default_factory=dict)
    merges: list[tuple[Scalar, Node]] = field(default_factory=list)
    key: Scalar | None = None

    @property
    def last_end(self) -> Position:
        """Where the last thing inside ends. YAML ends a block collection only at the next token, often lines later."""
        inside = [*self.items[-1:], *(node for _, node in self.entries[-1:] + self.merges[-1:]), *([self.key] if self.key else [])]
        return max((node.span.end for node in inside), default=self.start)


def compose(source: SourceFile, report: Report, budget: Budget) -> Node | None:
    """The root node of the one YAML document in `source`; None when it is empty or can't be read (the report says why)."""
    try:
        return _Composer(source, report, budget).run()
    except Unreadable:
        return None
    except yaml.YAMLError as error:
        span, message, help = explain(error, source)
        if span.start.line > len(source.line_starts):  # libyaml puts the end of a last line without a line end on the next
            end = source.position(len(source.text))
            span = Span(end, end)
        fix = escape_fix(source, span) if "unknown escape" in message else None
        report.error("KT101", message, Origin(source.path, span), help=help, fix=fix)
        return None


class _Composer:
    def __init__(self, source: SourceFile, report: Report, budget: Budget) -> None:
        self.source, self.report, self.budget = source, report, budget
        self.resolver: Any = yaml.resolver.Resolver()
        self.constructor = yaml.constructor.SafeConstructor()
        self.stack: list[_Open] = []
        self.anchors: dict[str, tuple[Node, int] | None] = {}
        self.root: Node | None = None
        self.documents = 0
        self.handlers: dict[type, Callable[[Any], None]] = {
            yaml.DocumentStartEvent: self.document,
            yaml.ScalarEvent: self.scalar,
            yaml.AliasEvent: self.alias,
            yaml.SequenceStartEvent: lambda event: self.open("seq", event),
            yaml.MappingStartEvent: lambda event: self.open("map", event),
            yaml.SequenceEndEvent: self.close,
            yaml.MappingEndEvent: self.close,
        }

    def run(self) -> Node | None:
        for event in _events(self.source.text):
            handler = self.handlers.get(type(event))
            if handler is not None:
                handler(event)
        return self.root

    def document(self, event: Any) -> None:
        self.documents += 1
        if self.documents > 1:
            self.stop(
                "KT107",
                "a second YAML document begins here; a rule file is one document: put `---` between files, not in them",
                event,
            )

    def scalar(self, event: Any) -> None:
        node = Scalar(self.value(event), _span(event), event.style or "", self.text(event))
        self.put(node, 1, event)
        if event.anchor is not None:
            self.anchors[event.anchor] = (node, 1)

    def value(self, event: Any) -> Any:
        tag = event.tag
        if tag is not None and tag != "!" and tag not in SCALAR_TAGS:
            self.refuse_tag(event)
        if tag in (None, "!"):
            if not event.implicit[0] or len(event.value) > MAX_NUMBER_CHARS:
                return event.value
            tag = self.resolver.resolve(yaml.ScalarNode, event.value, (True, False))
        if tag in (STANDARD + "str", STANDARD + "value", STANDARD + "merge"):
            return event.value
        if len(event.value) > MAX_NUMBER_CHARS:
            return event.value
        try:
            return self.constructor.construct_object(yaml.ScalarNode(tag, event.value))
        except (ValueError, KeyError, OverflowError, AttributeError, yaml.YAMLError):
            kind = tag.removeprefix(STANDARD)
            self.error(
                "KT101", f"{event.value!r} reads as a YAML {kind} but isn't a valid one; put it in quotes if it is text", event
            )
            return event.value

    def text(self, event: Any) -> str:
        return self.source.text[event.start_mark.index : event.end_mark.index]

    def alias(self, event: Any) -> None:
        if event.anchor not in self.anchors:
            message = f"`*{event.anchor}` refers to an anchor that isn't defined above; put text that begins with * in quotes"
            self.stop("KT106", message, event)
        target = self.anchors[event.anchor]
        if target is None:
            self.stop("KT106", f"`*{event.anchor}` stands inside the node that it names, which would never end", event)
        node, size = target
        self.put(node, size, event)

    def open(self, kind: str, event: Any) -> None:
        if event.tag not in COLLECTION_TAGS[kind]:
            self.refuse_tag(event)
        if len(self.stack) >= MAX_DEPTH:
            self.stop("KT104", f"nested more than {MAX_DEPTH} levels deep; a rule file needs about six", event)
        if self.stack and self.stack[-1].kind == "map" and self.stack[-1].key is None:
            self.stop("KT108", "a list or mapping can't be a key here: keys are plain words", event)
        self.stack.append(_Open(kind, _position(event.start_mark), bool(event.flow_style), event.anchor))
        if event.anchor is not None:
            self.anchors[event.anchor] = None

    def close(self, event: Any) -> None:
        done = self.stack.pop()
        span = Span(done.start, _position(event.end_mark) if done.flow else done.last_end)
        if done.kind == "seq":
            node: Node = Sequence(tuple(done.items), span)
        else:
            node = Mapping(tuple(done.entries + self.merged(done)), span)
        if done.anchor is not None:
            self.anchors[done.anchor] = (node, done.size)
        self.put(node, done.size, event, spent=True)

    def put(self, node: Node, size: int, event: Any, *, spent: bool = False) -> None:
        """Give a finished node to the collection that it stands in."""
        if not self.budget.spend(1 if spent else size):
            self.stop("KT104", f"more than {MAX_NODES} YAML nodes, each alias counted as all that it repeats", event)
        if not self.stack:
            self.root = node
            return
        top = self.stack[-1]
        top.size += size
        if top.kind == "seq":
            top.items.append(node)
        elif top.key is None:
            self.take_key(top, node, event)
        else:
            self.take_value(top, node)

    def take_key(self, top: _Open, node: Node, event: Any) -> None:
        if not isinstance(node, Scalar):
            self.stop("KT108", "a list or mapping can't be a key here: keys are plain words", event)
        else:
            top.key = node

    def take_value(self, top: _Open, node: Node) -> None:
        key, top.key = top.key, None
        assert key is not None
        if key.value == "<<" and key.style == "":
            top.merges.append((key, node))
            return
        first = top.seen.setdefault(_identity(key.value), key)
        if first is key:
            top.entries.append((key, node))
            return
        line = first.span.start.line
        self.report.error(
            "KT102",
            f"duplicate key `{key.raw or key.value}` (first at line {line}); YAML readers drop one of the two silently",
            Origin(self.source.path, key.span),
            help="begin the rule with `- `" if key.value in ("match", "replace") else "merge the two, or delete one",
        )

    def merged(self, mapping: _Open) -> list[tuple[Scalar, Node]]:
        """The entries that `<<` adds to a mapping: those that it doesn't write itself; of several sources the first wins."""
        added: list[tuple[Scalar, Node]] = []
        for key, value in mapping.merges:
            for source in value.items if isinstance(value, Sequence) else (value,):
                if not isinstance(source, Mapping):
                    message = (
                        "`<<` merges a mapping, or a list of mappings, into this one; write `<<: *name` of an anchored mapping"
                    )
                    self.report.error("KT106", message, Origin(self.source.path, key.span))
                    continue
                if not self.budget.spend(len(source.entries)):
                    self.stop("KT104", f"more than {MAX_NODES} YAML nodes, each alias counted as all that it repeats", key)
                for name, node in source.entries:
                    if mapping.seen.setdefault(_identity(name.value), name) is name:
                        added.append((name, node))
        return added

    def refuse_tag(self, event: Any) -> NoReturn:
        shown = event.tag.replace(STANDARD, "!!")[:60]
        message = f"the YAML tag `{shown}` isn't allowed: nothing is constructed from a rule file"
        help = "put text that begins with ! in quotes" if event.tag.startswith("!") else "write the plain value"
        self.stop("KT105", message, event, help=help)

    def error(self, code: str, message: str, event: Any, help: str | None = None) -> None:
        span = event.span if isinstance(event, Scalar) else _span(event)
        self.report.error(code, message, Origin(self.source.path, span), help=help)

    def stop(self, code: str, message: str, event: Any, help: str | None = None) -> NoReturn:
        self.error(code, message, event, help)
        raise Unreadable


def _events(text: str) -> Iterator[Any]:
    return iter(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _identity(value: Any) -> tuple[type, Any]:
    """What makes two keys one: Python's 1, 1.0 and true are three different keys in a file."""
    return (type(value), value)


def _position(mark: Any) -> Position:
    return Position(mark.line + 1, mark.column + 1)


def _span(event: Any) -> Span:
    return Span(_position(event.start_mark), _position(event.end_mark))
