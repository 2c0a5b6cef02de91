"""Markdown that comes in pieces: what stands on the terminal in the end is what all of it at once gives, whatever the pieces."""

from __future__ import annotations

import io
import os
import re

import pyte
import pytest

from ktopt.chat.display import MarkdownDisplay
from ktopt.render.style import Style

TEXT = """\
# Title
Some *words*, **bold** and `code`, [red]no markup[/red], <b>html</b> and [a link](http://example.com).
A second line.

1. one
2. two
   - within

| a | b |
|---|---|
| 1 | a long cell |

```python
def f(x):
\treturn "<b>"
```
> quoted
**not a list**

- a
- b
**a line that goes on**

Title by its line
---
last
"""


def drawn(pieces: list[str], columns: int = 60, rows: int = 24) -> list[str]:
    """The lines of a terminal on which a text was drawn that came in these pieces, a second after each other."""
    screen = pyte.HistoryScreen(columns, rows, history=10_000)
    stream, out, now = pyte.Stream(screen), io.StringIO(), 0.0
    display = MarkdownDisplay(out, Style(colour=True), lambda: os.terminal_size((columns, rows)), lambda: now)
    for piece in pieces:
        now += 1.5
        display.add(piece)
    display.close()
    stream.feed(out.getvalue().replace("\n", "\r\n"))
    assert not screen.cursor.hidden
    above = ["".join(line[x].data for x in range(columns)) for line in screen.history.top]
    lines = [line.rstrip() for line in [*above, *screen.display]]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def test_headings_lists_tables_code_and_html_are_shown() -> None:
    lines = drawn([TEXT])
    text = "\n".join(lines)
    assert lines[0] == "Title"
    assert "[red]no markup[/red],\n<b>html</b>" in text
    assert "(http://example.com)" in text
    assert "A second line." in lines
    assert '     return "<b>"' in text
    assert "```" not in text
    assert "**" not in text


@pytest.mark.parametrize("size", [1, 3, 7, 50])
@pytest.mark.parametrize("rows", [24, 6])
def test_pieces_make_what_the_whole_makes(size: int, rows: int) -> None:
    pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    assert drawn(pieces, rows=rows) == drawn([TEXT], rows=rows)


@pytest.mark.parametrize("line", ["row {n}  \n", "- item {n}\n", "| {n} | x |\n", "row {n}\n\n"])
def test_a_block_higher_than_the_terminal_is_whole_in_the_end(line: str) -> None:
    head = "| a | b |\n|---|---|\n" if line.startswith("|") else ""
    pieces = [head, *(line.format(n=n) for n in range(80))]
    found = [line for line in drawn(pieces, rows=10) if any(c.isdigit() for c in line)]
    assert ["".join(c for c in line if c.isdigit()) for line in found] == [str(n) for n in range(80)]


@pytest.mark.parametrize(
    "hostile", ["&#27;[31m", "&#x1b;]0;x&#7;", "\x1b[2J", "&#155;31m", "[x](http://a&#27;[2J)", "```\x1b[2J\n\x9b\n```"]
)
def test_no_control_sequence_gets_through_not_by_a_character_reference_either(hostile: str) -> None:
    out = io.StringIO()
    display = MarkdownDisplay(out, Style(), lambda: os.terminal_size((80, 24)))
    display.add(hostile)
    display.close()
    written = out.getvalue()
    for ours in ("\x1b[?2026h", "\x1b[?2026l", "\x1b[?25l", "\x1b[?25h", "\x1b[?7l", "\x1b[?7h", "\x1b[K", "\x1b[J"):
        written = written.replace(ours, "")
    assert not {"\x1b", "\x9b", "\x07"} & set(re.sub(r"\x1b\[[0-9;]*m", "", written))
    assert "\x1b[31m" not in written


def test_only_lines_that_change_are_written_again() -> None:
    out, now = io.StringIO(), 0.0
    display = MarkdownDisplay(out, Style(), lambda: os.terminal_size((80, 24)), lambda: now)
    for number in range(15):
        now += 1.5
        display.add(f"- item {number}\n")
    display.close()
    assert out.getvalue().count("item 3") <= 2


def test_wide_characters_are_broken_where_the_terminal_ends() -> None:
    lines = drawn(["日本語" * 30], columns=21)
    assert "".join("".join(lines).split()) == "日本語" * 30
    assert len(lines) == 9


def test_a_terminal_that_does_not_join_characters_gets_each_line_once_and_whole() -> None:
    hands = "\N{THUMBS UP SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}" * 3
    lines = [f"line {n} {hands} end{n}\n\n" for n in range(3)]
    text = "".join("".join(drawn([*"".join(lines)], columns=20)).split())
    assert [text.count(f"line{n}") for n in range(3)] == [1, 1, 1]
    assert [text.count(f"end{n}") for n in range(3)] == [1, 1, 1]
