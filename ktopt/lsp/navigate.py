"""Going to what a word refers to: a rule's shadowing rules, a selector's `let`, an imported file; and a file's outline."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ktopt.lsp.analysis import Analysis
from ktopt.lsp.cursor import cursor_at, let_lines, read_line, unquoted
from ktopt.lsp.place import about_match, names_selector
from ktopt.lsp.rules import Known, label, lets_of, share
from ktopt.lsp.text import Text
from ktopt.ruleset import Rule
from ktopt.selection import where
from ktopt.source import FILE_START, Origin, Span

_REF = re.compile(r"\$(\w+)")


def definition(now: Analysis, known: Known, offset: int) -> list[Origin]:
    """Where the thing at an offset of the editor's text comes from; for a rule, the rules that take what it would have taken."""
    cursor = cursor_at(now.shown.text, offset)
    if cursor is not None and names_selector(cursor):
        at = next((m for m in _REF.finditer(cursor.token) if m.start() <= offset - cursor.start <= m.end()), None)
        if at is not None:
            return _let(at[1], now)
    if cursor is not None and (cursor.path == ("import", "-") or (cursor.key == "import" and not cursor.path)) and cursor.token:
        path = os.path.normpath(os.path.join(os.path.dirname(now.path), cursor.token))
        return [Origin(path, FILE_START)] if os.path.isfile(path) else []
    if cursor is None or not about_match(cursor):
        return []
    rule = known.rule_at(now.shown.text.position(offset).line)
    return [where(r) for r in shadowing(rule, known)] if rule is not None else []


def shadowing(rule: Rule, known: Known) -> list[Rule]:
    """The rules that take modules which a rule matches, on any model, those that take most first."""
    counts: dict[int, int] = {}
    rules: dict[int, Rule] = {}
    for matches in known.analysis.matches.values():
        for index, count in share(rule, matches).lost_to.items():
            counts[index] = counts.get(index, 0) + count
            rules[index] = matches.ruleset.rules[index]
    return [rules[index] for index in sorted(counts, key=lambda i: -counts[i])]


def _let(name: str, now: Analysis) -> list[Origin]:
    """Where a named selector is written: as the compiler has it, or by the text while that can't be read."""
    found = lets_of(now.document).get(name)
    if found is not None:
        return [found[1]]
    text = now.shown.text
    for number, read in let_lines(text):
        if unquoted(read.key or "") == name:
            position = now.shown.source.position(text.line_starts[number] + read.column - now.shown.shift)
            return [Origin(now.path, Span(position, position))]
    return []


@dataclass(frozen=True)
class Entry:
    """One line of a file's outline: what it is called, what there is to say of it, and its lines from 0, the last included."""

    name: str
    detail: str
    kind: str
    first: int
    last: int


def outline(now: Analysis, known: Known) -> list[Entry]:
    """A file's rules and named selectors, by its lines, whether or not it can be read."""
    text = now.shown.text
    starts = list(_entries(text))
    found = []
    for i, (number, name, kind) in enumerate(starts):
        last = _last_line(text, number, starts[i + 1][0] if i + 1 < len(starts) else text.line_count)
        rule = (
            next((r for n in range(number, min(last, number + 3) + 1) if (r := known.rule_at(n))), None) if kind == "rule" else None
        )
        detail = ""
        if rule is not None:
            detail = ", ".join(filter(None, (rule.replace.operator.name, label(rule, known.analysis.matches))))
        found.append(Entry(name, detail, kind, number, last))
    return found


def _entries(text: Text) -> list[tuple[int, str, str]]:
    """The line, name and kind of each rule and each key at the top."""
    found: list[tuple[int, str, str]] = []
    count, column, under = 0, -1, ""
    for number in range(text.line_count):
        read = read_line(text.line(number))
        if read.blank:
            continue
        if read.dashes and (under == "rules" or not under) and column in (-1, read.dashes[0]):
            count, column = count + 1, read.dashes[0]
            name = unquoted(read.rest) if read.key == "id" else ""
            found.append((number, f"rule {count}" + (f" ({name})" if name else ""), "rule"))
        elif read.key is not None and read.column == 0 and not read.dashes:
            under = unquoted(read.key)
            if under in ("let", "place", "import"):
                found.append((number, under, "key"))
    return found


def _last_line(text: Text, first: int, before: int) -> int:
    """The last line that holds something, of those from `first` up to `before`."""
    last = before - 1
    while last > first and (read_line(text.line(last)).blank or text.line(last).startswith("rules:")):
        last -= 1
    return last
