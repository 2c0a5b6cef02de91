"""The format for people: each finding with its source line, carets under what is meant, related places, and help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ktopt.diagnostics import Diagnostic
from ktopt.render.style import SEVERITY_COLOUR, Style, printable, width
from ktopt.source import SourceFile, Span

MAX_LINE = 160
"""Characters of a source line that are shown; a longer one is cut around what is meant."""


def full(diagnostics: Sequence[Diagnostic], sources: Mapping[str, SourceFile], style: Style) -> str:
    return "\n".join(_finding(d, sources, style) for d in diagnostics)


def _finding(d: Diagnostic, sources: Mapping[str, SourceFile], style: Style) -> str:
    start = d.span.start
    colour = SEVERITY_COLOUR[d.severity]
    gutter = len(str(max([start.line, *(r.origin.span.start.line for r in d.related)])))
    place = style.paint(f"{printable(d.file)}:{start.line}:{start.column}:", "bold")
    lines = [f"{place} {style.paint(f'{d.code} {d.severity}', colour)}: {style.paint(printable(d.message), 'bold')}"]
    lines += _excerpt(sources.get(d.file), d.span, gutter, colour, "^", style)
    for related in d.related:
        at = related.origin.span.start
        arrow = style.paint(" " * gutter + "-->", "blue")
        lines.append(f"{arrow} {printable(related.origin.file)}:{at.line}:{at.column}: {printable(related.message)}")
        lines += _excerpt(sources.get(related.origin.file), related.origin.span, gutter, "blue", "-", style)
    if d.models:
        lines.append(f"{' ' * gutter} {style.paint('=', 'blue')} {style.paint('on', 'bold')}: {printable(', '.join(d.models))}")
    if d.help:
        first, *rest = printable(d.help).splitlines()
        lines.append(f"{' ' * gutter} {style.paint('=', 'blue')} {style.paint('help', 'bold')}: {first}")
        lines += [f"{' ' * gutter}         {line}" for line in rest]
    if d.fix:
        option = "--fix" if d.fix.safe else "--unsafe-fixes"
        mends = f"{style.paint('fix', 'bold')}: {printable(d.fix.title)} ({option})"
        lines.append(f"{' ' * gutter} {style.paint('=', 'blue')} {mends}")
    return "\n".join(lines) + "\n"


def _excerpt(source: SourceFile | None, span: Span, gutter: int, colour: str, mark: str, style: Style) -> list[str]:
    """The line where `span` starts, with marks under it; nothing where the line isn't there (an empty or unreadable file)."""
    if source is None or not 0 < span.start.line <= len(source.lines):
        return []
    line = source.lines[span.start.line - 1]
    begin = min(span.start.column - 1, len(line))
    end = min(span.end.column - 1, len(line)) if span.end.line == span.start.line else len(line.rstrip())
    text, begin, end = _cut(printable(line.rstrip("\r\n")), begin, max(end, begin + 1))
    bar = style.paint("|", "blue")
    number = style.paint(f"{span.start.line:>{gutter}}", "blue")
    marks = style.paint(mark * max(width(text[begin:end]), 1), colour)
    return [f"{' ' * gutter} {bar}", f"{number} {bar} {text}", f"{' ' * gutter} {bar} {' ' * width(text[:begin])}{marks}"]


def _cut(text: str, begin: int, end: int) -> tuple[str, int, int]:
    """A window of a long line that shows the span, and where the span stands in it."""
    if len(text) <= MAX_LINE:
        return text, begin, end
    left = max(0, begin - MAX_LINE // 4)
    right = min(len(text), left + MAX_LINE)
    before, after = ("..." if left else ""), ("..." if right < len(text) else "")
    return before + text[left:right] + after, begin - left + len(before), min(end, right) - left + len(before)
