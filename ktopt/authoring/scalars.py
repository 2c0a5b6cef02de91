"""How a YAML scalar is written in normal form."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ktopt.authoring.commented import Leaf

_WORD = re.compile(r"[A-Za-z_$./](?:[\w.:/$+-]*[\w./$+-])?", re.ASCII)
_KEY = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_BOOLEAN = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_resolver: Any = yaml.resolver.Resolver()


def scalar(leaf: Leaf, context: str = "") -> str:
    """A scalar's text: several lines for a block. `context` is "regex", "key", or anything else for a plain value."""
    prefix = f"{leaf.prefix} " if leaf.prefix else ""
    if leaf.kind == "alias":
        return f"*{leaf.text}"
    if "!" in leaf.prefix and "\n" not in leaf.raw and leaf.style not in ("|", ">"):
        return (prefix + leaf.raw).rstrip()
    if leaf.kind == "null":
        return prefix.rstrip() if leaf.raw == "" and context != "key" else f"{prefix}null"
    if leaf.kind == "bool":
        return prefix + _BOOLEAN[leaf.text.lower()]
    if leaf.kind == "other":
        return prefix + leaf.raw
    if leaf.style in ("|", ">") and _fits_block(leaf.text):
        return prefix + _block(leaf.text)
    return prefix + string(leaf.text, context, plain=leaf.style == "" and leaf.raw == leaf.text)


def string(text: str, context: str = "", *, plain: bool = False) -> str:
    """A string in one line. Where it was `plain`, without quotes, it stays so, unless it is a regex."""
    if not text.isprintable():
        return double(text)
    if context == "regex":
        return single(text)
    if plain or ((_KEY if context == "key" else _WORD).fullmatch(text) and _reads_as_text(text)):
        return text
    return single(text) if "\\" in text or '"' in text else f'"{text}"'


def single(text: str) -> str:
    """In single quotes, where a backslash is just that."""
    return "'" + text.replace("'", "''") + "'"


def double(text: str) -> str:
    """In double quotes, with an escape for everything that doesn't show."""
    return '"' + "".join(_escape(c) for c in text) + '"'


def _escape(c: str) -> str:
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}.get(c)
    if short or c.isprintable():
        return short or c
    code = ord(c)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _reads_as_text(text: str) -> bool:
    """Whether YAML takes the bare word for a string: not for no, null or 1e3."""
    tag: str = _resolver.resolve(yaml.ScalarNode, text, (True, False))
    return tag.endswith(":str")


def _fits_block(text: str) -> bool:
    """Whether a text of several lines can stand under | without marks of its own for indentation."""
    lines = text.split("\n")
    whole = bool(lines[0]) and len(lines) > 1 and not text.endswith("\n\n")
    return whole and all(line.isprintable() and (not line or line.strip()) for line in lines) and not lines[0].startswith(" ")


def _block(text: str) -> str:
    return ("|\n" + text[:-1]) if text.endswith("\n") else ("|-\n" + text)
