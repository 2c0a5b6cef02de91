"""Hovering: what a rule takes, what an operator, an op, a kwarg, a key, a selector's word or a code is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ktopt import registry
from ktopt.codes import CODES
from ktopt.lsp import meanings
from ktopt.lsp.analysis import Analysis
from ktopt.lsp.complete import written_lets
from ktopt.lsp.complete_paths import class_counts, times
from ktopt.lsp.cursor import Cursor, comment_column, cursor_at
from ktopt.lsp.operator_text import op_page, operator_page, option_field, option_page, setting_page
from ktopt.lsp.place import about_match, names_operator, names_selector, operator_of
from ktopt.lsp.rules import Known, describe, lets_of, selected
from ktopt.lsp.text import Text
from ktopt.treeindex import index_of, is_a
from ktopt.validate import keys as rule_keys

_CODE = re.compile(r"\bKT\d{3}\b", re.IGNORECASE)
_WORD = re.compile(r"@(?:[\w.*]|\{[^{}]*\})+|\$\w+|(?:config|hw)\.[\w.]+|[A-Za-z_][\w.]*(?:\[\d+\])?")


@dataclass(frozen=True)
class Shows:
    """What is shown, as Markdown, and the stretch of text that it is about."""

    page: str
    start: int
    end: int


def hover(now: Analysis, known: Known, offset: int) -> Shows | None:
    """What there is to say of the place at an offset of the editor's text. `known` is the last analysis whose file compiled."""
    text = now.shown.text
    found = _in_comment(text, offset)
    if found is not None:
        return found
    cursor = cursor_at(text, offset)
    if cursor is None or not cursor.token:
        return None
    word = Shows("", cursor.start, cursor.end)
    if names_selector(cursor):
        at = next((m for m in _WORD.finditer(cursor.token) if m.start() <= offset - cursor.start <= m.end()), None)
        if at is not None:
            word = Shows("", cursor.start + at.start(), cursor.start + at.end())
        parts = [_selector_word(at[0], cursor, now) if at is not None else "", _selector(cursor, now)]
    else:
        parts = [_key(cursor) if cursor.key is None else _value(cursor, cursor.key, now)]
    if about_match(cursor):
        rule = known.rule_at(text.position(offset).line)
        parts.append(describe(rule, known.analysis.matches) if rule is not None else "")
    page = "\n\n---\n\n".join(part for part in parts if part)
    return Shows(page, word.start, word.end) if page else None


def _in_comment(text: Text, offset: int) -> Shows | None:
    number = text.position(offset).line
    line, start = text.line(number), text.line_starts[number]
    comment = comment_column(line)
    if comment is None or "ktopt" not in line[comment:]:
        return None
    for found in _CODE.finditer(line, comment):
        if found.start() <= offset - start <= found.end() and found[0].upper() in CODES:
            return Shows(meanings.code_page(found[0].upper()), start + found.start(), start + found.end())
    return None


def _key(cursor: Cursor) -> str:
    """What a key means."""
    name, path = cursor.token, cursor.path
    if path[-1:] == ("kwargs",):
        spec = operator_of(cursor)
        return option_page(spec, name) if spec is not None and option_field(spec, name) is not None else ""
    if path in (("-",), ("rules", "-")):
        known = rule_keys.NATIVE_RULE if path[0] == "rules" else rule_keys.LIST_RULE
        return _meaning(name, meanings.RULE_KEYS) if name in known else ""
    if path in (("long_context",), ("kvc2",)):
        return setting_page(path[0], name)
    if path[-1:] == ("match",):
        return _meaning(name, meanings.MATCH_KEYS)
    if path[-1:] == ("replace",):
        return _meaning(name, meanings.REPLACE_KEYS)
    return _meaning(name, meanings.TOP_KEYS) if not path else ""


def _meaning(name: str, texts: dict[str, str]) -> str:
    return f"**{name}**: {texts[name]}" if name in texts else ""


def _value(cursor: Cursor, key: str, now: Analysis) -> str:
    if names_operator(cursor):
        spec = registry.find(cursor.token)
        return operator_page(spec) if spec is not None else ""
    if cursor.path[-1:] == ("kwargs",):
        spec = operator_of(cursor)
        if spec is None or option_field(spec, key) is None:
            return ""
        field = option_field(spec, key)
        op = spec.ops.get(cursor.token) if field is not None and field.metadata.get("op") else None
        return op_page(op) if op is not None else option_page(spec, key)
    if cursor.path in (("long_context",), ("kvc2",)):
        return setting_page(cursor.path[0], key)
    if cursor.path[-1:] == ("match",) and key == "class":
        return _class(cursor.token, now)
    return ""


def _class(written: str, now: Analysis) -> str:
    lines = []
    for model, graph in now.graphs.items():
        count = index_of(graph).by_class(lambda module: is_a(written, module)).bit_count()
        lines.append(f"- {model}: {times(count)}")
    return f"**{written}**\n\n" + "\n".join(lines) if lines else ""


def _selector_word(word: str, cursor: Cursor, now: Analysis) -> str:
    """What one word of a selector is."""
    lets = _lets(now)
    if word.startswith("@"):
        return f"**{word}**\n\n{selected(word, lets, now)}"
    if word.startswith("$"):
        return f"**{word}** is `{lets[word[1:]]}`\n\n{selected(word, lets, now)}" if word[1:] in lets else ""
    head, _, rest = word.partition(".")
    if head == "hw":
        return f"**{word}**: {meanings.HARDWARE.get(rest, 'a feature of the CPU')}"
    if head == "config":
        values = [f"- {name}: `{graph.config.get(rest)}`" for name, graph in now.graphs.items()]
        return f"**{word}** of the model's config.json\n\n" + "\n".join(values)
    text = meanings.FIELDS.get("shape[0]" if word.startswith("shape[") else word) or meanings.FUNCTIONS.get(word)
    if text is not None:
        return f"**{word}**: {text}"
    short = {name.rpartition(".")[2] for name in class_counts(now.graphs)}
    return _class(word, now) if word in short else ""


def _selector(cursor: Cursor, now: Analysis) -> str:
    """What a whole selector takes, where it is no rule's, which says more of it."""
    if cursor.key in ("match", "when"):
        return ""
    counts = selected(cursor.token, _lets(now), now)
    return f"`{cursor.token}`\n\n{counts}" if counts else ""


def _lets(now: Analysis) -> dict[str, str]:
    """The named selectors, as the compiler has them, and as the text has them while it can't be read."""
    return {**{name: text for name, (text, _) in lets_of(now.document).items()}, **written_lets(now.shown.text)}
