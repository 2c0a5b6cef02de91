"""Reading YAML nodes into plain values, with a finding for each that isn't of the shape asked for.

Every message begins with what the node belongs to ("rule 3", "rule 3 match"), and says what to write instead.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping as Map
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from ktopt.diagnostics import Edit, Fix, Report
from ktopt.operator import nearest, yaml_text
from ktopt.source import Mapping, Node, Origin, Position, Scalar, Sequence, Span

_TRUE_FALSE = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def kind_of(node: Node) -> str:
    """A node's kind in words, its value where it is short: 'the string "False"', "a list"."""
    if isinstance(node, Sequence):
        return "a list"
    if isinstance(node, Mapping):
        return "a mapping"
    if node.value is None:
        return "nothing"
    text = str(node.value) if isinstance(node.value, str) else node.raw
    shown = text if len(text) <= 40 else text[:37] + "..."
    return f'the string "{shown}"' if isinstance(node.value, str) else shown


def alike(word: str, other: str) -> bool:
    """Whether one is so near to the other that it is surely a misspelling of it."""
    return bool(other) and SequenceMatcher(None, word, other).ratio() >= 0.75


def unquoted_boolean(node: Node) -> bool | None:
    """The boolean that a quoted scalar would be without its quotes, or None."""
    if isinstance(node, Scalar) and node.style and isinstance(node.value, str):
        return _TRUE_FALSE.get(node.value.lower())
    return None


@dataclass(frozen=True)
class Shape:
    """Reads nodes of `file`. `where` names what they belong to."""

    file: str
    report: Report
    where: str = ""

    def inside(self, where: str) -> Shape:
        return replace(self, where=f"{self.where} {where}".strip())

    def origin(self, node: Node) -> Origin:
        return Origin(self.file, node.span)

    def error(self, code: str, message: str, at: Node | Span, **rest: Any) -> None:
        span = at if isinstance(at, Span) else at.span
        self.report.error(code, self.said(message), Origin(self.file, span), **rest)

    def warning(self, code: str, message: str, at: Node, **rest: Any) -> None:
        self.report.warning(code, self.said(message), self.origin(at), **rest)

    def info(self, code: str, message: str, at: Node) -> None:
        self.report.info(code, self.said(message), self.origin(at))

    def said(self, message: str) -> str:
        return f"{self.where}: {message}" if self.where else message

    def rewrite(self, title: str, at: Node | Span, text: str, *, safe: bool = True) -> Fix:
        """A fix that puts `text` in the place of a node. `safe` where nothing else can be meant."""
        return Fix(title, (Edit(self.file, at if isinstance(at, Span) else at.span, text),), safe)

    def deletion(self, mapping: Mapping, key: Scalar, node: Node) -> Fix | None:
        """A fix that deletes an entry, where it has a line of its own: in a block mapping each but the first surely has."""
        first = mapping.entries[0][0]
        if first.span.start != mapping.span.start or key is first or node.span.end.line != key.span.start.line:
            return None
        line = key.span.start.line
        return self.rewrite(f"delete `{key.value}`", Span(Position(line, 1), Position(line + 1, 1)), "")

    def misspelt(self, mapping: Mapping, missing: str, known: Collection[str]) -> bool:
        """Whether a key that isn't there was probably written as one that isn't known, which has its own finding."""
        return any(nearest(str(key.value), known) == missing for key, _ in mapping if key.value not in known)

    def keys(self, mapping: Mapping, known: Collection[str], elsewhere: Map[str, str]) -> None:
        """KT202 for each key that isn't `known`; `elsewhere` says of keys that belong somewhere else where that is."""
        for key, _ in mapping:
            name = str(key.value)
            if key.value in known:
                continue
            if name in elsewhere:
                self.error("KT202", f"`{name}` doesn't belong here: {elsewhere[name]}", key)
                continue
            near = nearest(name, known)
            message = f"unknown key `{name}`" + (f"; did you mean `{near}`?" if near else "")
            certain = alike(name, near) and near not in {k.value for k, _ in mapping}
            fix = self.rewrite(f"write `{near}`", key, near, safe=False) if certain else None
            self.error("KT202", message, key, help=f"the keys here are {', '.join(known)}", fix=fix)

    def text(self, node: Node, name: str, example: str) -> str | None:
        """A string's value, or None with a finding."""
        if isinstance(node, Scalar) and isinstance(node.value, str):
            return node.value
        if isinstance(node, Scalar) and node.value is None:
            self.error("KT205", f"`{name}` is empty", node, help=f"write {example}, or delete the key")
        else:
            help = "put it in quotes" if isinstance(node, Scalar) else f"write {example}"
            self.error("KT206", f"`{name}` must be a string, not {kind_of(node)}", node, help=help)
        return None

    def mapping(self, node: Node, name: str, example: str, fix: Fix | None = None) -> Mapping | None:
        if isinstance(node, Mapping):
            return node
        if isinstance(node, Scalar) and node.value is None:
            shown = name if " " in name else f"`{name}:`"
            self.error("KT205", f"{shown} is empty", node, help=f"write {example} below it, or delete the key", fix=fix)
        else:
            shown = name if " " in name else f"`{name}`"
            self.error("KT206", f"{shown} must be a mapping, not {kind_of(node)}", node, help=f"write {example}")
        return None

    def texts(self, node: Node, name: str, example: str) -> tuple[str, ...]:
        """A list of strings; one string counts as a list of it."""
        if isinstance(node, Sequence):
            found = [self.text(item, name, example) for item in node.items]
            return tuple(text for text in found if text is not None)
        if isinstance(node, Scalar) and isinstance(node.value, str):
            return (node.value,)
        self.error("KT206", f"`{name}` must be a list of strings, not {kind_of(node)}", node, help=f"write {example}")
        return ()

    def boolean(self, node: Node, name: str, default: bool) -> bool:
        if isinstance(node, Scalar) and isinstance(node.value, bool):
            return node.value
        quoted = unquoted_boolean(node)
        if quoted is not None and isinstance(node, Scalar):
            message = f'{name}: expected true/false, got the string "{node.value}" - remove the quotes'
            fix = self.rewrite("remove the quotes", node, node.value)
            self.error("KT110", message, node, help="a string that isn't empty counts as true, whatever it says", fix=fix)
        elif isinstance(node, Scalar) and node.value in (0, 1):
            value = bool(node.value)
            message = f"`{name}` must be true or false, not {node.value}; read as {yaml_text(value)}"
            self.warning("KT206", message, node, fix=self.rewrite(f"write {str(value).lower()}", node, str(value).lower()))
            return value
        elif isinstance(node, Scalar) and node.value is None:
            self.error("KT205", f"`{name}` is empty", node, help="write true or false")
        else:
            self.error("KT206", f"`{name}` must be true or false, not {kind_of(node)}", node, help="write true or false")
        return default

    def count(self, node: Node, name: str) -> int | None:
        if isinstance(node, Scalar) and type(node.value) is int and node.value >= 0:
            return node.value
        message = f"`{name}` must be a whole number from 0, not {kind_of(node)}"
        if isinstance(node, Scalar) and isinstance(node.value, str) and node.style and node.value.isdecimal():
            fix = self.rewrite("remove the quotes", node, node.value)
            self.error("KT206", message, node, help="remove the quotes", fix=fix)
        else:
            self.error("KT206", message, node, help=f"write `{name}: 61`")
        return None
