"""A text table: columns as wide as they need, the first one wrapped where the terminal is too narrow, and perhaps a tree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat, zip_longest
from typing import NamedTuple

from ktopt.render.style import PLAIN, Style, printable, width

GAP = 2
LEAST = 24
"""The first column is never made narrower than this, unless the caller says so."""
DEEPER = 4
"""How much further in a wrapped path goes on."""
_BREAK = re.compile(r"(?<!\.)\.(?!\.)|,")
"""Where a path may be broken: after a dot or a comma, and not inside a range."""


class Column(NamedTuple):
    """A column's heading, and whether its cells stand to the right (numbers) or are dimmed."""

    title: str
    right: bool = False
    dim: bool = False


class Branch(NamedTuple):
    """What stands before a row's first cell where rows are a tree: in its first line, and in its others."""

    first: str = ""
    others: str = ""


def layout(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    limit: int,
    style: Style = PLAIN,
    *,
    least: int = LEAST,
    branches: Sequence[Branch] = (),
) -> str:
    """The table as lines of at most `limit` columns where its fixed columns leave room. Columns that are empty throughout are left
    out; a cell of several lines takes several. With `branches`, one for each row, the rows are a tree."""
    used = [0, *_used(columns, rows)]
    cells = [[[printable(line) for line in row[i].split("\n")] for i in used] for row in rows]
    branches = branches or [Branch()] * len(rows)
    first = max([width(columns[0].title), *(width(b.first) + width(row[0][0]) for b, row in zip(branches, cells, strict=True))])
    widths = [max(least, min(first, room(columns, rows, limit))), *_fixed(columns, rows)]
    heads = [columns[i] for i in used]
    lines = [style.paint(_line(heads, [c.title for c in heads], widths, PLAIN), "bold")]
    for row, branch in zip(cells, branches, strict=True):
        row[0] = wrap_path(row[0][0], widths[0] - width(branch.first), 1 if branch.first else DEEPER)
        befores = (branch.first, *repeat(branch.others, max(map(len, row)) - 1))
        lines += [
            _line(heads, line, widths, style, before) for line, before in zip(zip_longest(*row, fillvalue=""), befores, strict=True)
        ]
    return "\n".join(lines)


def tree_branches(depths: Sequence[int], style: Style = PLAIN) -> list[Branch]:
    """The branches of rows by how deep they stand, parents first; those of depth 0 have no lines before them."""
    down, more, last = ("│  ", "├─ ", "└─ ") if style.lines else ("|  ", "|- ", "`- ")
    goes_on: list[bool] = []
    branches = []
    for i in range(len(depths) - 1, -1, -1):
        depth = depths[i]
        follows = goes_on[depth : depth + 1] == [True]
        goes_on = [*goes_on[:depth], *[False] * (depth - len(goes_on)), True]
        before = "".join(down if on else "   " for on in goes_on[1:depth])
        own = "" if depth == 0 else more if follows else last
        has_below = i + 1 < len(depths) and depths[i + 1] > depth
        inner = "" if depth == 0 else before + (down if follows else "   ")
        branches.append(Branch(before + own, inner + (down if has_below else "")))
    return branches[::-1]


def room(columns: Sequence[Column], rows: Sequence[Sequence[str]], limit: int) -> int:
    """What the other columns leave of `limit` to the first one; it may be less than nothing."""
    fixed = _fixed(columns, rows)
    return limit - sum(fixed) - GAP * len(fixed)


def _fixed(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """The widths of the columns after the first that have anything in them."""
    return [
        max([width(columns[i].title), *(width(printable(line)) for row in rows for line in row[i].split("\n"))])
        for i in _used(columns, rows)
    ]


def _used(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    return [i for i in range(1, len(columns)) if any(row[i] for row in rows)]


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int], style: Style, before: str = "") -> str:
    parts: list[str] = []
    for column, cell, wide in zip(columns, cells, widths, strict=True):
        pad = " " * (wide - width(cell) - (0 if parts else width(before)))
        text = style.paint(cell, "dim") if column.dim else cell
        parts.append(pad + text if column.right else text + pad)
    return style.paint(before, "dim") + (" " * GAP).join(parts).rstrip()


def wrap_path(text: str, wide: int, deeper: int = DEEPER) -> list[str]:
    """A long path in several lines, broken after a dot or a comma where there is one; the later ones are indented `deeper`."""
    lines, indent = [], ""
    deep = " " * (len(text) - len(text.lstrip()) + deeper)
    while len(indent + text) > wide:
        space = max(wide - len(indent), 1)
        at = max((found.end() for found in _BREAK.finditer(text, 1) if found.end() <= space), default=space)
        lines.append(indent + text[:at])
        text, indent = text[at:], deep
    return [*lines, indent + text]
