"""Where a part of a rule's pattern stands in the file."""

from __future__ import annotations

import re

from ktopt.ruleset import NameClass, Rule
from ktopt.source import Origin, Position, Span

NUMBER = re.compile(r"(?<=layers)(?:\\?\.)((?:\d|\\d|\[\d[^\]]*\])+|\((?!\?)[^()]*\d[^()]*\))")
"""In a pattern, what stands for the layer's number: digits and classes, or one group."""


def name_origin(rule: Rule) -> Origin:
    """Where a rule's name stands, else its match."""
    return (rule.match.name_origin if isinstance(rule.match, NameClass) else None) or rule.match_origin


def part_of(name: Origin, pattern: str, start: int, end: int) -> Origin:
    """The place of pattern[start:end]; that of the whole pattern where the file writes it in a way that doesn't tell.

    name  where the pattern stands, its quotes included
    """
    first, last = name.span.start, name.span.end
    if first.line != last.line:
        return name
    written = last.column - first.column
    backslashes = pattern.count("\\")
    if written in (len(pattern), len(pattern) + 2):
        before, until = start, end
    elif written == len(pattern) + backslashes + 2:  # in double quotes, where each is written twice
        before, until = start + pattern.count("\\", 0, start), end + pattern.count("\\", 0, end)
    else:
        return name
    column = first.column + (written > len(pattern))
    return Origin(name.file, Span(Position(first.line, column + before), Position(first.line, column + until)))
