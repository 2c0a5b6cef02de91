"""A native rule file's text with the lines of a placement in its `place:` map; the rest of the text stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

from ktopt.authoring.scalars import string
from ktopt.placing.writing import Line
from ktopt.source import Document, Mapping, Position, Scalar, SourceFile


def with_places(document: Document, lines: Sequence[Line], anew: bool = False) -> str:
    """The file's text with these lines. Lines that it has keep their place, those that only an imported file has stay there; a map
    that is written on one line, or as `auto`, is written anew, as any is by `anew`, and a line `auto: rest` goes."""
    source, root = document.source, document.root
    assert isinstance(root, Mapping)
    key, value = root.key("place"), root.get("place")
    if key is None:
        return _inserted(source, root, lines)
    others = [entry for entry in value.entries if entry[0].value != "auto"] if isinstance(value, Mapping) else []
    if not anew and isinstance(value, Mapping) and others and value.span.start.line > key.span.start.line:
        return _amended(source, value, lines)
    assert value is not None
    start, end = source.offset(key.span.start), source.offset(value.span.end)
    return source.text[:start] + _block(lines).rstrip("\n") + source.text[end:]


def _block(lines: Sequence[Line]) -> str:
    return "place:\n" + "".join(f"  {string(line.device, 'key')}: {string(line.text)}\n" for line in lines)


def _inserted(source: SourceFile, root: Mapping, lines: Sequence[Line]) -> str:
    """Before `rules:` and the comments right above it, or at the end."""
    text, rules = source.text, root.key("rules")
    if rules is None:
        return text.rstrip("\n") + "\n" + _block(lines)
    rows = text.splitlines(keepends=True)
    at = rules.span.start.line - 1
    while at and rows[at - 1].startswith("#"):
        at -= 1
    return "".join([*rows[:at], _block(lines), *rows[at:]])


def _amended(source: SourceFile, value: Mapping, lines: Sequence[Line]) -> str:
    """Values that grew are written anew, and lines for other devices follow the last one."""
    text, by_device = source.text, {line.device: line for line in lines if line.written}
    auto = value.key("auto")
    last = value.entries[-1][1]
    row_end = text.find("\n", source.offset(last.span.end))
    row_end = len(text) if row_end < 0 else row_end
    indent = " " * (value.entries[0][0].span.start.column - 1)
    new = [f"\n{indent}{string(line.device, 'key')}: {string(line.text)}" for line in lines if not line.written]
    text = text[:row_end] + "".join(new) + text[row_end:]
    for key, node in reversed(value.entries):
        if key is auto:
            start, end = source.offset(Position(key.span.start.line, 1)), source.offset(Position(key.span.start.line + 1, 1))
            text = text[:start] + text[end:]
            continue
        line = by_device.get(_device(key))
        if line is not None and line.added and isinstance(node, Scalar):
            start, end = source.offset(node.span.start), source.offset(node.span.end)
            text = text[:start] + string(line.text) + text[end:]
    return text


def _device(key: Scalar) -> str:
    from ktopt.placement import canonical_device

    return canonical_device(str(key.value))
