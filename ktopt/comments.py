"""The comments of a YAML text: where they stand, and whether a line holds anything else.

PyYAML drops comments, but its scanner says where every scalar stands, and only inside one is a # no comment.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice

import yaml

from ktopt.source import Position, SourceFile

MAX_TOKENS = 400_000
"""A file within compose.py's limits has fewer; of one that has more, only the first comments are found."""

_START = re.compile(r"(?<!\S)#")


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment: its line, the column of its #, both from 1, its text up to the line's end, and whether it is alone on its line."""

    line: int
    column: int
    text: str
    alone: bool


def comments(source: SourceFile, word: str = "") -> list[Comment]:
    """The comments that contain `word`, in order. Of a text that YAML can't read, those before the error."""
    if word not in source.text:
        return []
    scalars = _scalars(source)
    begins = [begin for begin, _ in scalars]
    found = []
    for number, start in enumerate(source.line_starts, 1):
        end = source.line_starts[number] if number < len(source.line_starts) else len(source.text)
        line = source.text[start:end].rstrip("\r\n\x85\u2028\u2029")
        if word not in line:
            continue
        for mark in _START.finditer(line):
            at = bisect_right(begins, start + mark.start()) - 1
            if at < 0 or start + mark.start() >= scalars[at][1]:
                text = line[mark.start() :]
                if word in text:
                    found.append(Comment(number, mark.start() + 1, text, not line[: mark.start()].strip()))
                break
    return found


def _scalars(source: SourceFile) -> list[tuple[int, int]]:
    """Where each scalar's text begins and ends; for a block (| or >) the lines below its header. After an error, all the rest."""
    spans: list[tuple[int, int]] = []
    end = 0
    try:
        for token in islice(yaml.scan(source.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), MAX_TOKENS):
            end = token.end_mark.index
            if isinstance(token, yaml.ScalarToken):
                begin = token.start_mark.index
                if token.style in ("|", ">"):
                    begin = source.offset(Position(token.start_mark.line + 2, 1))
                spans.append((begin, end))
        if end < len(source.text) and not isinstance(token, yaml.StreamEndToken):
            spans.append((end, len(source.text)))
    except yaml.YAMLError:
        spans.append((end, len(source.text)))
    return spans


def is_bare(line: str) -> bool:
    """Whether a line is blank or holds nothing but a comment."""
    text = line.strip()
    return not text or text.startswith("#")
