"""What PyYAML says of a text that it can't read, in words that help: where, what is wrong, what to write.

Both of PyYAML's scanners (the C one and the Python one) word their errors their own way, so this looks at the text too.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import yaml

from ktopt.diagnostics import Edit, Fix
from ktopt.source import SourceFile, Span

MAX_TOKENS = 400_000
"""After so many, an unclosed quote isn't looked for."""


def explain(error: yaml.YAMLError, source: SourceFile) -> tuple[Span, str, str | None]:
    """Where the error stands, a message, and help."""
    if isinstance(error, yaml.reader.ReaderError):
        return _explain_character(error, source)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return Span.at(1, 1), f"YAML: {error}", None
    line, column = mark.line + 1, mark.column + 1
    problem = str(getattr(error, "problem", ""))
    context = str(getattr(error, "context", "") or "")
    opened = getattr(error, "context_mark", None)
    return _explain_marked(problem, context, opened, line, column, source)


def _explain_character(error: Any, source: SourceFile) -> tuple[Span, str, str | None]:
    code = error.character if isinstance(error.character, int) else ord(str(error.character)[:1] or "\0")
    found = source.text.find(chr(code))  # PyYAML counts its position in bytes or in characters, by the scanner
    place = source.position(max(found, 0))
    return Span.at(place.line, place.column), f"YAML: the character U+{code:04X} can't stand in a YAML file", "delete it"


def _explain_marked(
    problem: str, context: str, opened: Any, line: int, column: int, source: SourceFile
) -> tuple[Span, str, str | None]:
    text = source.lines[line - 1] if line <= len(source.lines) else ""
    rest = text[column - 1 :]
    here = Span.at(line, column)
    opened_at = f"line {opened.line + 1}" if opened is not None else "above"
    if "unknown escape" in problem:
        return _explain_escape(text, line, column)
    if "hexdecimal" in problem or "hexadecimal" in problem:
        return here, "YAML: a \\x, \\u or \\U escape needs 2, 4 or 8 hexadecimal digits", "write the digits, or use single quotes"
    if "cannot start any token" in problem:
        return here, *_explain_start(rest[:1])
    if "scanning an alias" in context or "scanning an anchor" in context:
        start = opened.column + 1 if opened is not None else column
        mark = text[start - 1 : start]
        return (
            Span.at(line, start),
            f"YAML: `{mark}` begins a reference here, not text",
            f"put text that begins with {mark} in quotes",
        )
    if "unexpected end of stream" in problem and "quoted" in context and opened is not None:
        span = Span.at(opened.line + 1, opened.column + 1)
        return span, "YAML: the quote that opens here is never closed", "close it on the same line"
    unclosed = _quote_over_lines(source, line, column)
    if unclosed is not None:
        return unclosed
    if "document start" in problem:
        return here, "YAML: text after the end of the document", "a file holds one list or one mapping"
    if "depth" in problem:
        return here, "YAML: nested too deep", "a rule file needs about six levels"
    if "node content" in problem:
        return (
            here,
            "YAML: a value is missing here, or a bracket before it isn't closed",
            "put text that contains brackets in quotes",
        )
    if "flow" in context:
        closing = "}" if "mapping" in context else "]"
        message = f"YAML: a `,` or `{closing}` is missing; the list or mapping opened at {opened_at} isn't closed"
        return here, message, f"close it with `{closing}`; put text that contains brackets in quotes"
    if "mapping values are not allowed" in problem:
        above = _NO_SPACE.match(source.lines[line - 2]) if line > 1 else None
        if above and source.lines[line - 2][above.end()] in "\"'":
            return Span.at(line - 1, above.end(), 1), "YAML: no space after the colon", "put a space after the colon"
        return here, *_explain_colon(text, column)
    if "sequence entries are not allowed" in problem:
        return here, "YAML: a list item (`- `) can't begin on this line", "begin the list on its own line, below the key"
    if "could not find expected ':'" in problem:
        tight = _NO_SPACE.match(source.lines[opened.line]) if opened is not None else None
        if tight:
            return Span.at(opened.line + 1, tight.end(), 1), "YAML: no space after the colon", "put a space after the colon"
        return here, f"YAML: the key at {opened_at} has no `:`", "write `key: value`, with a space after the colon"
    if "block" in context:
        return here, *_explain_block(rest, opened_at, opened, column)
    return here, "YAML: " + (f"{problem} {context}".strip() or "syntax error"), None


_NO_SPACE = re.compile(r"\s*(?:- +)?[A-Za-z_]+:(?=[^\s:])")


def _quote_over_lines(source: SourceFile, line: int, column: int) -> tuple[Span, str, str | None] | None:
    """The finding for an error just behind a quoted text of several lines: its quote should have been closed on the first."""
    last = None
    try:
        for token in islice(yaml.scan(source.text, Loader=yaml.CSafeLoader), MAX_TOKENS):
            if (token.start_mark.line + 1, token.start_mark.column + 1) >= (line, column):
                break
            if isinstance(token, yaml.ScalarToken):
                last = token
    except yaml.YAMLError:
        pass
    if last is None or not last.style or last.style in "|>":
        return None
    start, end = last.start_mark, last.end_mark
    if start.line == end.line or end.line + 1 != line:
        return None
    span = Span.at(start.line + 1, start.column + 1)
    return span, f"YAML: the quote that opens here is closed only in line {line}", "close it on the same line"


def _explain_escape(text: str, line: int, column: int) -> tuple[Span, str, str | None]:
    if text[column - 1 : column] != "\\" and text[column - 2 : column - 1] == "\\":
        column -= 1
    character = text[column : column + 1]
    message = f'YAML: unknown escape "\\{character}" in a double-quoted scalar; write "\\\\{character}" or use single quotes'
    return (
        Span.at(line, column, 2),
        message,
        "in double quotes YAML reads the backslashes itself; in single quotes it leaves them alone",
    )


_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"' r"|'(?:[^']|'')*'")


def escape_fix(source: SourceFile, span: Span) -> Fix | None:
    """For an unknown escape in double quotes: the scalar in single quotes, where every backslash in it is single and a regex's."""
    line = source.lines[span.start.line - 1]
    for quoted in _QUOTED.finditer(line):
        text = quoted[1]
        if quoted.start() < span.start.column - 1 < quoted.end() and text is not None:
            if "'" in text or '\\"' in text or "\\\\" in text:
                return None
            place = Span.at(span.start.line, quoted.start() + 1, quoted.end() - quoted.start())
            return Fix("use single quotes", (Edit(source.path, place, f"'{text}'"),))
    return None


def _explain_start(character: str) -> tuple[str, str | None]:
    if character == "\t":
        return "YAML: a tab can't indent a YAML line", "use spaces"
    return f"YAML: a plain value can't begin with {character}", f"put text that begins with {character} in quotes"


def _explain_colon(text: str, column: int) -> tuple[str, str | None]:
    if ": " in text[: column - 1]:
        return "YAML: a second `: ` on one line", "put a value that contains a colon in quotes"
    return (
        "YAML: a `key:` can't stand here: the line before it is not finished, or is indented otherwise",
        "write a space after every colon, and give keys of one mapping the same indentation",
    )


def _explain_block(rest: str, opened_at: str, opened: Any, column: int) -> tuple[str, str | None]:
    depth = opened.column + 1 if opened is not None else column
    if depth != column and (":" in rest or rest.startswith("- ")):
        message = f"YAML: this line is indented to column {column}; the block that began at {opened_at} stands at column {depth}"
        return message, "give lines that belong together the same indentation"
    if rest.startswith("- "):
        return "YAML: a list where a key of the mapping was expected", "put the list under `rules:`"
    if rest[:1] and ":" in rest:
        message = f"YAML: a key where an item (`- `) of the list that began at {opened_at} was expected"
        return message, "begin each rule with `- `; a file is a list or a mapping, not both"
    return (
        f"YAML: text after the end of a value, in the block that began at {opened_at}",
        "put the whole value in one pair of quotes",
    )
