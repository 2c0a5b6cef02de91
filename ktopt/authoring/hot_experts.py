"""A native rule file's text with hot experts in the kwargs of its rules; the rest of the text stays as it is."""

from __future__ import annotations

from collections.abc import Mapping as Map
from collections.abc import Sequence as Seq

from ktopt.diagnostics import KtoptError
from ktopt.pattern.numbers import as_ranges
from ktopt.ruleset import RuleSet
from ktopt.source import Document, Mapping, Node, Scalar, Sequence, SourceFile

KEY = "hot_experts"
Layers = Map[int, Seq[int]]


def with_hot_experts(document: Document, ruleset: RuleSet, hot: Map[int, Layers]) -> str:
    """The file's text in which each rule of `hot`, by its index, has these hot experts: none where it names no layer. KtoptError
    for a rule of an imported file, which is not written to."""
    source, root = document.source, document.root
    text = source.text
    rules = root.get("rules") if isinstance(root, Mapping) else None
    for index in sorted(hot, reverse=True):
        rule = ruleset.rules[index]
        if rule.origin.file != source.path:
            if not hot[index]:
                continue
            raise KtoptError(
                f"hot experts belong into rule {rule.number} ({rule.id}), which is in {rule.origin.file}: place that file's rules, "
                "or give this file a rule of its own for the experts"
            )
        assert isinstance(rules, Sequence)
        node = rules.items[index]
        assert isinstance(node, Mapping)
        text = _changed(source, text, node, hot[index])
    return text


def _changed(source: SourceFile, text: str, rule: Mapping, layers: Layers) -> str:
    """`text` is as the source's up to the rule's end."""
    replace = rule.get("replace")
    holder = next((m for m in (rule, replace) if isinstance(m, Mapping) and m.get("kwargs") is not None), None)
    kwargs = holder.get("kwargs") if holder is not None else None
    if isinstance(kwargs, Mapping):
        if (key := kwargs.key(KEY)) is not None:
            return _replaced(source, text, kwargs, key, layers) if layers else _cut(source, text, kwargs, key)
        return _added(source, text, kwargs, KEY, layers) if layers else text
    return _added(source, text, rule, f"kwargs: {{{KEY}", layers, "}") if layers else text


def _replaced(source: SourceFile, text: str, kwargs: Mapping, key: Scalar, layers: Layers) -> str:
    """With another value of an entry."""
    value = kwargs.get(KEY)
    assert value is not None
    lines, indent = _lines(layers), _indent(source, kwargs)
    new = f" {_flow(lines, indent)}" if _is_flow(source, kwargs) else "".join(f"\n{indent}{line}" for line in lines)
    return text[: source.offset(key.span.end)] + ":" + new + text[_end(source, value) :]


def _cut(source: SourceFile, text: str, kwargs: Mapping, key: Scalar) -> str:
    """Without an entry of a mapping: of a flow mapping with the comma beside it, of a block one with its lines."""
    names = [name for name, _ in kwargs.entries]
    at = names.index(key)
    value = kwargs.entries[at][1]
    start, end = source.offset(key.span.start), _end(source, value)
    if not _is_flow(source, kwargs) and len(names) > 1:
        end = text.find("\n", end) + 1 or len(text)
        return text[: start - (key.span.start.column - 1)] + text[end:]
    if not _is_flow(source, kwargs):
        return text[:start] + "{}" + text[end:]
    if at + 1 < len(names):
        end = source.offset(names[at + 1].span.start)
    elif at:
        start = _end(source, kwargs.entries[at - 1][1])
    return text[:start] + text[end:]


def _added(source: SourceFile, text: str, mapping: Mapping, key: str, layers: Layers, closing: str = "") -> str:
    """With an entry more at the end of a mapping."""
    lines = _lines(layers)
    column = mapping.entries[0][0].span.start.column if mapping.entries else mapping.span.start.column
    indent = _indent(source, mapping)
    if not mapping.entries:  # {}
        start = source.offset(mapping.span.start)
        return text[:start] + f"{{{key}: {_flow(lines, indent)}}}" + text[text.index("}", start) + 1 :]
    end = _end(source, mapping.entries[-1][1])
    if _is_flow(source, mapping):
        return text[:end] + f", {key}: {_flow(lines, indent)}{closing}" + text[end:]
    head = "\n" + " " * (column - 1) + f"{key}:"
    row_end = text.find("\n", end)
    row_end = len(text) if row_end < 0 else row_end
    block = f" {_flow(lines, indent)}{closing}" if closing else "".join(f"\n{indent}{line}" for line in lines)
    return text[:row_end] + head + block + text[row_end:]


def _lines(layers: Layers) -> list[str]:
    return [f'{layer}: "{as_ranges(ids)}"' for layer, ids in sorted(layers.items())]


def _indent(source: SourceFile, mapping: Mapping) -> str:
    """How far the lines of a mapping stand in that is an entry of this one."""
    if mapping.entries and not _is_flow(source, mapping):
        return " " * (mapping.entries[0][0].span.start.column + 1)
    row = source.lines[mapping.span.start.line - 1]
    return " " * (len(row) - len(row.lstrip()) + 6)


def _flow(lines: Seq[str], indent: str) -> str:
    """A mapping in braces, an entry on each line."""
    return "{" + ",".join(f"\n{indent}{line}" for line in lines) + "}"


def _is_flow(source: SourceFile, mapping: Mapping) -> bool:
    return source.text[source.offset(mapping.span.start)] == "{"


def _end(source: SourceFile, node: Node) -> int:
    """Where a node's text ends: a block's span may reach to the next line."""
    if isinstance(node, Mapping) and node.entries and not _is_flow(source, node):
        return _end(source, node.entries[-1][1])
    if isinstance(node, Sequence) and node.items and source.text[source.offset(node.span.start)] != "[":
        return _end(source, node.items[-1])
    return len(source.text[: source.offset(node.span.end)].rstrip())
