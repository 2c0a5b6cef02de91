"""The plot of benchmarks/mla.py: what one attention layer holds for a moment against the context, as SVG for light and dark."""

from __future__ import annotations

from math import log2
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 420, 70, 230, 46, 50
KEY = 32
"""How long the piece of a line is that stands before its label."""
X_TICKS = (4096, 8192, 20_480, 65_536, 139_264)
Y_TICKS = (0.5, 1, 2, 4, 8, 16, 32)
COLOURS = {"expanded": ("#b4540a", "#f0a35e"), "absorbed": ("#1f5fbf", "#7db3f5"), "all": ("#666", "#aaa")}
"""Of each way, on light and on dark pages."""
DASHES = {8192: "", 4096: "7 4", 1024: "2 3"}


def whole_context(context: int, chunk: int) -> float:
    """Bytes that transformers' attention of DeepSeek-V3 takes, which expands keys and values of all tokens at once (bfloat16)."""
    heads, nope, rope, value = 128, 128, 64, 128
    return 2.0 * heads * (context * (2 * nope + rope + value) + min(chunk, context) * (2 * (nope + rope) + value))


def memory_plot(rows: list[dict[str, Any]]) -> str:
    """Lines of the rows that are absorbed and expanded, by chunk, and of attention that expands the whole context."""
    lines = []
    for way in ("absorbed", "expanded"):
        for chunk in DASHES:
            points = [(row["context"], row["measured"]) for row in rows if row["way"] == way and row["chunk"] == chunk]
            lines.append(_line(points, way, DASHES[chunk], f"{way}, chunk {chunk:,}"))
    lines.append(_line([(t, whole_context(t, 8192)) for t in X_TICKS], "all", "", "whole context expanded"))
    return "\n".join((_head(), *_axes(), *_lifted(lines), "</svg>", ""))


def _x(context: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * log2(context / X_TICKS[0]) / log2(X_TICKS[-1] / X_TICKS[0])


def _y(gigabytes: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * log2(gigabytes / Y_TICKS[0]) / log2(Y_TICKS[-1] / Y_TICKS[0])


def _head() -> str:
    light = "".join(f".{way}{{stroke:{pair[0]}}}" for way, pair in COLOURS.items())
    dark = "".join(f".{way}{{stroke:{pair[1]}}}" for way, pair in COLOURS.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">\n'
        "<title>Memory of one DeepSeek-V3 attention layer while a chunk of a prompt is read</title>\n"
        "<style>text{font:13px sans-serif;fill:#222}.grid{stroke:#ddd}path{fill:none;stroke-width:2}"
        f"{light}@media(prefers-color-scheme:dark){{text{{fill:#ddd}}.grid{{stroke:#444}}{dark}}}</style>\n"
        f'<text x="{LEFT}" y="20">GB held for a moment by one attention layer of DeepSeek-V3, bfloat16, against the context</text>'
    )


def _axes() -> list[str]:
    made = []
    for tick in Y_TICKS:
        made.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(tick):.1f}" y2="{_y(tick):.1f}"/>')
        made.append(f'<text x="{LEFT - 8}" y="{_y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in X_TICKS:
        made.append(f'<text x="{_x(tick):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{tick:,}</text>')
    made.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">tokens of context</text>')
    return made


def _line(points: list[tuple[int, float]], way: str, dash: str, label: str) -> tuple[float, str, str, str]:
    """Its height at the end, how it is drawn, its path, and its label."""
    places = [(_x(context), _y(count / 1e9)) for context, count in sorted(points)]
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return places[-1][1], f'class="{way}"{dashed}', path, label


def _lifted(lines: list[tuple[float, str, str, str]]) -> list[str]:
    """Paths, and labels beside their ends, apart from each other, each after a piece of its line: where lines are close, a label
    may stand beside another's end."""
    made, at, left = [], 0.0, WIDTH - RIGHT + 8
    for y, drawn, path, label in sorted(lines):
        at = max(at + 16, y + 4)
        made.append(f'<path {drawn} d="{path}"/>')
        made.append(f'<path {drawn} d="M{left} {at - 4:.1f} h{KEY}"/><text x="{left + KEY + 6}" y="{at:.1f}">{label}</text>')
    return made
