"""What a cursor's place is in a rule file: an operator's name, its kwargs, a selector, what a rule matches."""

from __future__ import annotations

import re

from ktopt import registry
from ktopt.lsp.cursor import Cursor
from ktopt.operator import OperatorSpec


def operator_of(cursor: Cursor) -> OperatorSpec | None:
    """The operator whose kwargs hold the cursor."""
    level = next((level for level in reversed(cursor.levels) if level.key == "kwargs"), None)
    if level is None:
        return None
    name = level.beside.get("class") or level.beside.get("replace", "")
    inner = re.search(r"class:\s*([\w.]+)", name)
    return registry.find(inner[1] if inner else name or "default")


def names_operator(cursor: Cursor) -> bool:
    """Whether the cursor is in an operator's name."""
    if cursor.key == "class":
        return cursor.path[-1:] == ("replace",)
    return cursor.key == "replace" and cursor.path == ("rules", "-")


def names_selector(cursor: Cursor) -> bool:
    """Whether the cursor is in a selector."""
    if cursor.key in ("match", "when"):
        return cursor.path == ("rules", "-")
    return cursor.key is not None and cursor.path in (("let",), ("place",))


def about_match(cursor: Cursor) -> bool:
    """Whether the cursor is in what a rule matches, on its `match`, or on what names or limits the rule."""
    path = cursor.path[1:] if cursor.path[:1] == ("rules",) else cursor.path
    if path == ("-", "match"):
        return True
    word = cursor.token if cursor.key is None else cursor.key
    return path == ("-",) and word in ("match", "id", "expect", "when", "recursive")
