"""Markdown as lines of a terminal: rich draws it, changed where a chat wants it otherwise than a document.

Line breaks of the source are kept, HTML is shown as it is written instead of being left out, links are written out, headings stand
to the left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown, MarkdownElement
from rich.text import Text

from ktopt.chat.safety import shown
from ktopt.render.style import width as width_of

_PARSER = MarkdownIt("commonmark", {"html": False}).enable("table").enable("strikethrough")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_BLANKS_AT_END = re.compile(r"[ ]+$")
CODE_THEME = "ansi_dark"
"""Has the terminal's own 16 colours, and no background."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the top level: its tokens, and the line of the source that it begins at."""

    tokens: list[Token]
    line: int

    @property
    def changes_above(self) -> bool:
        """Whether what comes may change lines that are there, as a row of a table changes the widths of its columns."""
        return self.tokens[0].type == "table_open"


def blocks_of(text: str) -> list[Block]:
    """The blocks of a text, in order."""
    found: list[Block] = []
    tokens: list[Token] = []
    for token in _PARSER.parse(text):
        tokens.append(token)
        if token.children:
            for child in token.children:
                if child.type == "softbreak":
                    child.type = "hardbreak"
        if token.level == 0 and token.nesting <= 0:
            found.append(Block(tokens, (tokens[0].map or [0])[0]))
            tokens = []
    return found


def lines_of(block: Block, console: Console, width: int) -> list[str]:
    """A block as lines of at most `width` columns, with ANSI styles; without the empty lines that rich puts around some."""
    with console.capture() as capture:
        console.print(_Tokens(block.tokens), width=width)
    lines = [_BLANKS_AT_END.sub("", line) for line in _safe(capture.get()).split("\n")]
    full = [number for number, line in enumerate(lines) if characters_of(line)]
    return lines[full[0] : full[-1] + 1] if full else []


def columns_of(line: str) -> int:
    """The columns that a line takes, styles left out."""
    return cell_len(_ANSI.sub("", line))


def most_columns_of(line: str) -> int:
    """The same on a terminal that doesn't join characters, such as a hand and the colour of its skin."""
    return width_of(_ANSI.sub("", line))


def characters_of(line: str) -> int:
    """The characters of a line that aren't blank: they stay the same where it is broken otherwise."""
    return len("".join(_ANSI.sub("", line).split()))


def _safe(text: str) -> str:
    """What rich drew, with no control sequences but styles: a character reference of Markdown could be one."""
    parts: Iterator[str] = iter(_ANSI.split(text))
    safe = shown(next(parts))
    for style, part in zip(_ANSI.findall(text), parts, strict=True):
        safe += style + shown(part)
    return safe


class _Heading(Heading):
    """A heading at the left: bold, the first two levels underlined."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text: Text = self.text
        text.justify = "left"
        text.stylize("bold underline" if self.tag in ("h1", "h2") else "bold")
        yield text


class _Tokens(Markdown):
    """Markdown of tokens that are there already."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "heading_open": _Heading}

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
        self.parsed = tokens
