"""A plot over the length of a context, both axes logarithmic, as SVG for light and dark pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 70, 290, 46, 50
KEY = 32
"""How long the piece of a line is that stands before its label."""


@dataclass
class ContextPlot:
    """Lines with labels.

    title     what the file is called; `heading` stands above the lines and says what the numbers are
    x_ticks   tokens of context, y_ticks numbers: the first and the last of each bound the plot
    colours   of each kind of line, on light and on dark pages
    """

    title: str
    heading: str
    x_ticks: tuple[int, ...]
    y_ticks: tuple[float, ...]
    colours: dict[str, tuple[str, str]]
    _lines: list[tuple[float, str, str, str]] = field(default_factory=list)  # height at the end, how it is drawn, path, label

    def line(self, points: list[tuple[int, float]], kind: str, dash: str, label: str) -> None:
        """Add a line through points of context and number; a point alone is a short stroke."""
        places = [(self._x(context), self._y(number)) for context, number in sorted(points)]
        if len(places) == 1:
            (x, y), places = places[0], []
            places = [(x - 5, y), (x + 5, y)]
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._lines.append((places[-1][1], f'class="{kind}"{dashed}', path, label))

    def svg(self) -> str:
        """The whole file."""
        return "\n".join((self._head(), *self._axes(), *self._lifted(), "</svg>", ""))

    def _x(self, context: float) -> float:
        first, last = self.x_ticks[0], self.x_ticks[-1]
        return LEFT + (WIDTH - LEFT - RIGHT) * log2(context / first) / log2(last / first)

    def _y(self, number: float) -> float:
        first, last = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * log2(number / first) / log2(last / first)

    def _head(self) -> str:
        light, dark = ("".join(f".{kind}{{stroke:{pair[i]}}}" for kind, pair in self.colours.items()) for i in (0, 1))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
            ' role="img">\n'
            f"<title>{self.title}</title>\n"
            "<style>text{font:13px sans-serif;fill:#222}.grid{stroke:#ddd}path{fill:none;stroke-width:2}"
            f"{light}@media(prefers-color-scheme:dark){{text{{fill:#ddd}}.grid{{stroke:#444}}{dark}}}</style>\n"
            f'<text x="{LEFT}" y="20">{self.heading}</text>'
        )

    def _axes(self) -> list[str]:
        made = []
        for tick in self.y_ticks:
            made.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self._y(tick):.1f}" y2="{self._y(tick):.1f}"/>')
            made.append(f'<text x="{LEFT - 8}" y="{self._y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for context in self.x_ticks:
            made.append(f'<text x="{self._x(context):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{context:,}</text>')
        made.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">tokens of context</text>')
        return made

    def _lifted(self) -> list[str]:
        """Paths, and labels beside their ends, apart from each other, each after a piece of its line: where lines are close, a
        label may stand beside another's end."""
        made, at, left = [], 0.0, WIDTH - RIGHT + 8
        for y, drawn, path, label in sorted(self._lines):
            at = max(at + 16, y + 4)
            made.append(f'<path {drawn} d="{path}"/>')
            made.append(f'<path {drawn} d="M{left} {at - 4:.1f} h{KEY}"/><text x="{left + KEY + 6}" y="{at:.1f}">{label}</text>')
        return made
