"""What is wrong with a regex that a rule writes, as far as that shows without a model: it doesn't compile, it has a character class
that was meant as a number range, or a backslash that is matched instead of escaping.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ktopt.diagnostics import Edit, Fix
from ktopt.pattern import PatternError, compile_pattern
from ktopt.pattern.mistakes import explain_regex_error
from ktopt.pattern.numbers import number_regex
from ktopt.source import Origin

_RANGE = re.compile(r"\[(\d{1,4})-(\d{1,4})\]")


@dataclass(frozen=True, slots=True)
class RegexProblem:
    """Why a pattern is wrong: what to point at (offset from 0, and length), what to write instead, and the pattern rewritten where
    that is certain: the whole of it, or for a class that compiles what it points at."""

    offset: int
    message: str
    help: str | None = None
    rewrite: str | None = None
    length: int = 1


def check_regex(pattern: str) -> RegexProblem | None:
    """Why `pattern` can't be used, or None."""
    try:
        compile_pattern(pattern)
    except PatternError as error:
        offset = error.column - 1
        if error.cause is None:
            return RegexProblem(offset, error.message)
        message, help, rewrite = explain_regex_error(pattern, error.cause)
        return RegexProblem(
            offset, f"invalid regex at column {error.column}: {message}", help, rewrite, 3 if "range" in message else 1
        )
    return None


def class_as_number_range(pattern: str) -> RegexProblem | None:
    """A class that compiles but reads as a range of numbers, such as [10-19] (one character: 0, 1 or 9)."""
    for found in _RANGE.finditer(pattern):
        low, high = int(found[1]), int(found[2])
        if len(found[1]) + len(found[2]) > 2 and low < high and not _escaped(pattern, found.start()):
            matched = ", ".join(sorted(set(re.findall(found[0], "0123456789"))))
            message = f"{found[0]} matches one character ({matched}), not the numbers {low} to {high}"
            numbers = number_regex(range(low, high + 1))
            return RegexProblem(
                found.start(), message, f"for layers {low} to {high} write {numbers}", numbers, length=len(found[0])
            )
    return None


def literal_backslash(pattern: str) -> int | None:
    r"""The offset of a \\ in a pattern, which asks for a backslash that no module path holds; None where there is none."""
    at = pattern.find("\\")
    while at >= 0:
        if pattern[at + 1 : at + 2] == "\\":
            return at
        at = pattern.find("\\", at + 2)
    return None


def pattern_fix(title: str, name: Origin, pattern: str) -> Fix | None:
    """An unsafe fix that writes another pattern for a rule's `name`, in single quotes; None where that can't be done."""
    several_lines = name.span.start.line != name.span.end.line
    if several_lines or "'" in pattern or not pattern.isprintable() or check_regex(pattern) is not None:
        return None
    return Fix(title, (Edit(name.file, name.span, f"'{pattern}'"),), safe=False)


def _escaped(pattern: str, at: int) -> bool:
    before = pattern[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
