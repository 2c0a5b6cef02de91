"""Completion: keys at every level of both rule forms, operators, their kwargs and values, devices, classes, paths, codes.

What is offered depends on the lines around the cursor (cursor.py) and on the trees that the file was last checked on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ktopt import registry
from ktopt.codes import CODES
from ktopt.config import SECTIONS
from ktopt.lsp import meanings
from ktopt.lsp.complete_paths import Graphs, Next, class_counts, in_regex, in_selector, times
from ktopt.lsp.cursor import Cursor, comment_column, cursor_at, let_lines, read_line, unquoted
from ktopt.lsp.operator_text import (
    is_device,
    op_page,
    operator_page,
    option_field,
    option_page,
    option_type,
    option_values,
    setting_page,
    setting_type,
    setting_values,
    specs,
)
from ktopt.lsp.place import names_operator, names_selector, operator_of
from ktopt.lsp.text import Text
from ktopt.models.shipped import known_models
from ktopt.operator import option_names
from ktopt.placement import DTYPES
from ktopt.validate import keys as rule_keys

MOST_FILES = 100
OPENS = ("match", "replace", "kwargs", "rules", "let", "place", "import", *rule_keys.SECTIONS)
"""Keys whose values stand on lines of their own."""
_DEVICE = re.compile(r"\b(?:cuda|npu|xpu):\d+\b")
_IN_IGNORE = re.compile(r"#\s*ktopt:\s*ignore\s*\[([^\]]*)$")
_IN_MODELINE = re.compile(r"#\s*ktopt:\s*models?\s*=\s*(?:[^,]*,)*\s*([^\s,]*)$")
_AFTER_NAME = re.compile(r"#\s*ktopt:\s*(\w*)$")
LIST_RULE = "- match:\n    name: '${1:^model\\\\.layers\\\\.}'\n  replace:\n    class: ${2:default}"
NATIVE_RULE = '- id: ${1:name}\n  match: "${2:@model.layers.*}"\n  replace: ${3:default}'
NATIVE_FILE = f"version: 1\nrules:\n  {NATIVE_RULE.replace(chr(10), chr(10) + '  ')}"


@dataclass(frozen=True)
class Choice:
    """One completion: what is shown, what takes the place of text[start:end], and what it is. The lowest `rank` comes first.
    `page` explains it; a long page is named by `subject` ("operator:NAME", "code:KT302") and fetched when it is looked at."""

    label: str
    insert: str
    start: int
    end: int
    kind: str
    detail: str = ""
    page: str = ""
    snippet: bool = False
    rank: int = 5
    subject: str = ""


@dataclass(frozen=True)
class Around:
    """What completion knows beside the text: the trees, the selectors that imports name, and the file's folder."""

    graphs: Graphs
    imported: Mapping[str, str]
    folder: Path


def complete(text: Text, offset: int, around: Around) -> list[Choice]:
    """What may stand at an offset."""
    number = text.position(offset).line
    line = text.line(number)
    before = line[: offset - text.line_starts[number]]
    comment = comment_column(before)
    if comment is not None:
        return _in_comment(before[comment:], offset)
    cursor = cursor_at(text, offset)
    if cursor is None:
        return []
    return _Completion(text, offset, cursor, around).choices()


def _in_comment(typed: str, offset: int) -> list[Choice]:
    if found := _IN_IGNORE.search(typed):
        taken = len(found[1].rpartition(",")[2].lstrip())
        start = offset - taken
        return [Choice(c.code, c.code, start, offset, "code", c.title, subject=f"code:{c.code}") for c in CODES.values()]
    if found := _IN_MODELINE.search(typed):
        return [Choice(name, name, offset - len(found[1]), offset, "value", "shipped model") for name in known_models()]
    if found := _AFTER_NAME.search(typed):
        start = offset - len(found[1])
        ignore = Choice("ignore[...]", "ignore[$1] ${2:why}", start, offset, "key", "silence findings of this line", snippet=True)
        return [ignore, Choice("model=", "model=", start, offset, "key", "check this file on a model")]
    return []


def subject_page(subject: str) -> str:
    """The page that a choice's subject names; "" for none."""
    kind, _, name = subject.partition(":")
    spec = registry.find(name) if kind == "operator" else None
    if spec is not None:
        return operator_page(spec)
    return meanings.code_page(name) if kind == "code" and name in CODES else ""


@dataclass(frozen=True)
class _Completion:
    text: Text
    offset: int
    cursor: Cursor
    around: Around

    def choices(self) -> list[Choice]:
        return self.keys() if self.cursor.key is None else self.values(self.cursor.key)

    def choice(self, label: str, kind: str, detail: str = "", page: str = "", *, insert: str = "", rank: int = 5) -> Choice:
        """A choice that takes the whole token's place."""
        return Choice(label, insert or label, self.cursor.start, self.cursor.end, kind, detail, page, False, rank)

    def keys(self) -> list[Choice]:
        path = self.cursor.path
        native = path[:1] == ("rules",)
        if path in ((), ("rules",)) and not self.cursor.quote:
            return self.at_top() if not path else [self.snippet("a rule", NATIVE_RULE)]
        if path in (("-",), ("rules", "-")):
            return self.known(meanings.RULE_KEYS, rule_keys.NATIVE_RULE if native else rule_keys.LIST_RULE)
        if path[-1:] == ("match",):
            return self.known(meanings.MATCH_KEYS, rule_keys.MATCH)
        if path[-1:] == ("replace",):
            return self.known(meanings.REPLACE_KEYS, rule_keys.REPLACE)
        if path[-1:] == ("kwargs",):
            return self.kwargs()
        if path in (("long_context",), ("kvc2",)):
            return self.settings(path[0])
        if path == ("place",):
            rest = self.choice("auto", "value", "auto: rest leaves what no line takes to ktopt")
            return [
                c
                for c in [*self.devices(), rest]
                if unquoted(c.insert) not in self.cursor.beside or unquoted(c.insert) == self.cursor.token
            ]
        if path in (("import", "-"), ("architectures", "-")):
            return self.values(path[0])
        return []

    def at_top(self) -> list[Choice]:
        """In the first column: the keys of a native file, or a rule of a list, as the file has it; both in an empty one."""
        first = next(
            (r for n in range(self.text.line_count) if not (r := read_line(self.text.line(n))).blank and self.not_here(n)), None
        )
        rule, file = self.snippet("a rule", LIST_RULE), self.snippet("a native rule file", NATIVE_FILE)
        if first is None:
            return [rule, file, *self.known(meanings.TOP_KEYS, rule_keys.TOP)]
        return [rule] if first.dashes else self.known(meanings.TOP_KEYS, rule_keys.TOP)

    def not_here(self, number: int) -> bool:
        return number != self.text.position(self.offset).line

    def snippet(self, label: str, body: str) -> Choice:
        """A snippet, indented as far as the cursor is, where the editor doesn't."""
        return Choice(
            label, body, self.cursor.start, self.cursor.end, "snippet", "snippet", f"```yaml\n{_plain(body)}\n```", True, 1
        )

    def known(self, texts: Mapping[str, str], keys: Iterable[str]) -> list[Choice]:
        """The keys that aren't there yet, in the order in which files have them."""
        given = self.cursor.beside.keys() - {self.cursor.token}
        left = [key for key in keys if key not in given and key in texts]
        return [self.key(key, texts[key], rank) for rank, key in enumerate(left)]

    def key(self, name: str, text: str, rank: int = 5, detail: str = "") -> Choice:
        ends = self.text.text[self.cursor.end : self.cursor.end + 2].startswith((":", '":', "':"))
        opens = (
            name in ("match", "replace", "kwargs", "rules", "let", "place", "import", *rule_keys.SECTIONS) and "\n" in self.after()
        )
        return self.choice(name, "key", detail, text, insert=name if ends else f"{name}:" if opens else f"{name}: ", rank=rank)

    def after(self) -> str:
        """What follows the token on its line, the line's end included."""
        end = self.text.line_end(self.text.position(self.offset).line)
        return self.text.text[self.cursor.end : end].strip() or "\n"

    def kwargs(self) -> list[Choice]:
        spec = operator_of(self.cursor)
        if spec is None:
            return []
        given = {f.name for key in self.cursor.beside if key != self.cursor.token and (f := option_field(spec, key)) is not None}
        left = [f.name for f in fields(spec.config) if f.name not in given]
        return [self.key(name, option_page(spec, name), rank, option_type(spec, name)) for rank, name in enumerate(left)]

    def settings(self, section: str) -> list[Choice]:
        config: Any = SECTIONS[section]
        names = option_names(config)
        given = {names.get(key) for key in self.cursor.beside if key != self.cursor.token}
        left = [f.name for f in fields(config) if f.name not in given]
        return [self.key(name, setting_page(section, name), rank, setting_type(section, name)) for rank, name in enumerate(left)]

    def values(self, key: str) -> list[Choice]:
        c = self.cursor
        if c.path in (("long_context",), ("kvc2",)):
            return [self.choice(value, "value") for value in setting_values(c.path[0], key)]
        if names_operator(c):
            return self.operators()
        if names_selector(c):
            return self.steps(in_selector(c.typed, self.around.graphs, self.lets(), when=key == "when"))
        if c.path[-1:] == ("match",) and key == "name":
            return self.steps(in_regex(c.typed, self.around.graphs, c.quote))
        if c.path[-1:] == ("match",) and key == "class":
            return self.classes()
        if c.path[-1:] == ("kwargs",) or (len(c.path) > 1 and c.path[-2] == "kwargs"):
            return self.kwarg_values(key)
        if key == "recursive":
            return [self.choice("false", "value", "the rule's modules are closed to later rules"), self.choice("true", "value")]
        if c.path in ((), ("import", "-"), ("architectures", "-")):
            return self.top_values(key)
        return []

    def operators(self) -> list[Choice]:
        """Operators by their own names, then by KTransformers' dotted ones."""
        found = []
        for spec in specs():
            fits = ", ".join(spec.roles) or "any module"
            rank = 1 if spec.name == "default" else 2
            for name in (spec.name, *spec.aliases):
                made = self.choice(name, "operator", fits, rank=rank if name == spec.name else 4)
                found.append(replace(made, subject=f"operator:{spec.name}"))
        return found

    def classes(self) -> list[Choice]:
        counts = class_counts(self.around.graphs)
        return [self.choice(name, "class", times(count), rank=2) for name, count in counts.items()]

    def kwarg_values(self, key: str) -> list[Choice]:
        spec = operator_of(self.cursor)
        if spec is None:
            return []
        if self.cursor.path[-1] != "kwargs" or is_device(spec, key):
            return self.devices()
        found = []
        for value in option_values(spec, key):
            op = spec.ops.get(value)
            detail = "" if op is None else ", ".join(op.devices) + (" (not in this version)" if op.needs else "")
            page = "" if op is None else op_page(op)
            found.append(self.choice(value, "op" if op else "value", detail, page))
        return found

    def devices(self) -> list[Choice]:
        """Those that the file names, and the usual ones. A colon makes no mapping in "cuda:0", yet files quote it."""
        written = dict.fromkeys(_DEVICE.findall(self.text.text))
        last = max((int(name.rpartition(":")[2]) for name in written if name.startswith("cuda:")), default=-1)
        names = dict.fromkeys(("cpu", "cuda:0", *sorted(written), f"cuda:{min(last + 1, 63)}"))
        return [
            self.choice(name, "value", "device", insert=name if self.cursor.quote or ":" not in name else f'"{name}"')
            for name in names
        ]

    def top_values(self, key: str) -> list[Choice]:
        if key == "architectures":
            names = dict.fromkeys(a for graph in self.around.graphs.values() for a in graph.architectures)
            return [self.choice(name, "class") for name in names]
        if key == "import":
            return [self.choice(name, "file") for name in self.files()]
        if key == "default_device":
            return self.devices()
        values = {"dtype": DTYPES, "version": ("1",)}.get(key, ())
        return [self.choice(value, "value") for value in values]

    def files(self) -> list[str]:
        try:
            names = sorted(os.listdir(self.around.folder))
        except OSError:
            return []
        return [name for name in names if name.endswith((".yaml", ".yml"))][:MOST_FILES]

    def lets(self) -> dict[str, str]:
        """The names that `$` may stand before, and their selectors: those of imports, and those above the cursor in `let:`."""
        return {**self.around.imported, **written_lets(self.text, self.text.position(self.offset).line)}

    def steps(self, steps: Iterable[Next]) -> list[Choice]:
        """Choices that take the place of the last part of what is typed."""
        after = re.match(r"\w*", self.text.text[self.offset : self.cursor.end])
        end = self.offset + (after.end() if after else 0)
        return [
            Choice(s.text, s.text, self.offset - s.taken, end, s.kind, s.detail, s.help, False, rank)
            for rank, s in enumerate(steps)
        ]


def written_lets(text: Text, before: int | None = None) -> dict[str, str]:
    """The entries of a file's `let:`, as far as they stand above the line `before` (from 0) where it is in there."""
    found: dict[str, str] = {}
    for number, read in let_lines(text):
        if number == before:
            return found
        found[unquoted(read.key or "")] = unquoted(read.rest)
    return found


def _plain(snippet: str) -> str:
    return re.sub(r"\$\{\d+:([^}]*)\}|\$\d+", lambda m: m[1] or "", snippet).replace("\\\\", "\\")
