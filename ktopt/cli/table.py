"""A text table: columns as wide as they need, the first one wrapped where the terminal is too narrow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from ktopt.render.style import PLAIN, Style, printable, width

GAP = 2
LEAST = 24
"""The first column is never made narrower than this, unless the caller says so."""


class Column(NamedTuple):
    """A column's heading, and whether its cells stand to the right (numbers) or are dimmed."""

    title: str
    right: bool = False
    dim: bool = False


def layout(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], limit: int, style: Style = PLAIN, *, least: int = LEAST
) -> str:
    """The table as lines of at most `limit` columns where its fixed columns leave room. Columns that are empty throughout are left
    out; a cell of several lines takes several."""
    used = [i for i in range(len(columns)) if i == 0 or any(row[i] for row in rows)]
    columns = [columns[i] for i in used]
    cells = [[[printable(line) for line in row[i].split("\n")] for i in used] for row in rows]
    widths = [max([width(c.title), *(width(line) for row in cells for line in row[i])]) for i, c in enumerate(columns)]
    widths[0] = max(least, min(widths[0], limit - sum(widths[1:]) - GAP * (len(widths) - 1)))
    lines = [style.paint(_line(columns, [c.title for c in columns], widths, PLAIN), "bold")]
    for row in cells:
        row[0] = wrap_path(row[0][0], widths[0])
        lines += [_line(columns, line, widths, style) for line in zip_longest(*row, fillvalue="")]
    return "\n".join(lines)


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int], style: Style) -> str:
    parts = []
    for column, cell, wide in zip(columns, cells, widths, strict=True):
        pad = " " * (wide - width(cell))
        text = style.paint(cell, "dim") if column.dim else cell
        parts.append(pad + text if column.right else text + pad)
    return (" " * GAP).join(parts).rstrip()


def wrap_path(text: str, wide: int) -> list[str]:
    """A long path in several lines, broken after a dot or a comma where there is one; the later ones are indented."""
    lines, indent = [], ""
    deep = " " * (len(text) - len(text.lstrip()) + 4)
    while len(indent + text) > wide:
        room = wide - len(indent)
        at = max(text.rfind(".", 1, room), text.rfind(",", 1, room)) + 1 or room
        if text[at - 2 : at] == "..":  # not inside a range
            at = text.rfind("{", 0, at) if text.rfind("{", 0, at) > 0 else at
        lines.append(indent + text[:at])
        text, indent = text[at:], deep
    return [*lines, indent + text]
