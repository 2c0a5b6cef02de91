"""What people get wrong in a regex for layer numbers and paths, and what they meant."""

from __future__ import annotations

import re

from ktopt.pattern.numbers import number_regex

_RANGE_CLASS = re.compile(r"\[(\d+)-(\d+)\]")


def explain_regex_error(text: str, error: re.error) -> tuple[str, str, str | None]:
    """What is wrong with the regex `text`, what to write instead, and the whole pattern rewritten where the meaning is certain.

    `error` is what `re.compile(text)` raised.
    """
    position = error.pos or 0
    message = error.msg
    if found := re.fullmatch(r"bad character range (.+)", message):
        return _bad_range(text, position, f'bad character range "{found[1]}"')
    if message in ("nothing to repeat", "multiple repeat") and text[position : position + 1] == "*":
        return _glob_star(text, position, message)
    if message.startswith("missing ), unterminated"):
        return "a ( is not closed", r"add the missing ), or write \( where a bracket is meant", None
    if message == "unbalanced parenthesis":
        return "a ) closes nothing", r"take it out, or write \) where a bracket is meant", None
    if message == "unterminated character set":
        return "a [ is not closed", r"add the missing ], or write \[ where a bracket is meant", None
    if message.startswith("bad escape (end"):
        return "it ends in a lone backslash", r"take it out, or write \. for a dot", text[:-1]
    if message.startswith("bad escape"):
        wrong = text[position : position + 2]
        rewrite = text[:position] + wrong[1:] + text[position + 2 :]
        return f"{wrong} is no escape", f"write {wrong[1:]} without the backslash; for a dot write \\.", rewrite
    if message.startswith("look-behind"):
        return "a look-behind must have a fixed width", "test with a look-ahead, such as (?!.*kv_b_proj), instead", None
    if message.startswith("global flags"):
        return "a flag such as (?i) stands inside the pattern", "put it first", None
    return message, "a name is a Python regular expression; to match text as it is, put \\ before . ( [ * + ?", None


def _bad_range(text: str, position: int, message: str) -> tuple[str, str, str | None]:
    for found in _RANGE_CLASS.finditer(text):
        if found.start() <= position < found.end() and int(found[1]) <= int(found[2]) < 100_000:
            first, last = int(found[1]), int(found[2])
            group = number_regex(range(first, last + 1))
            start, end = _with_parentheses(text, found.start(), found.end())
            help = f"a class matches one character; for layers {first} to {last} write {group}"
            return message, help, text[:start] + group + text[end:]
    return message, "a class matches one character, and its ranges run upwards, as in [0-9]", None


def _with_parentheses(text: str, start: int, end: int) -> tuple[int, int]:
    """The stretch, widened by the plain parentheses that hold nothing else."""
    if text[start - 1 : start] == "(" and text[end : end + 1] == ")":
        return start - 1, end + 1
    return start, end


def _glob_star(text: str, position: int, message: str) -> tuple[str, str, str | None]:
    if message == "multiple repeat":
        rewrite = re.sub(r"\*\*+", ".*", text)
        return "** is a glob, not a regex", "write .* for any run of characters", rewrite
    rewrite = text[:position] + "." + text[position:]
    return "the * has nothing before it to repeat", "in a regex any run of characters is .*, not *", rewrite
