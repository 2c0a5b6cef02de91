"""Findings as the protocol's diagnostics: ranges in the editor's columns, related places, and a link to the code's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from lsprotocol import types
from pygls.uris import from_fs_path

import ktopt.codes
from ktopt.diagnostics import Diagnostic, Severity
from ktopt.lsp.analysis import Analysis
from ktopt.lsp.project import Problem
from ktopt.lsp.text import Shown, Text
from ktopt.source import Origin, SourceFile, Span

SOURCE = "ktopt"
MOST = 500
"""Findings that are shown of one file; an editor with more is of no use to anyone."""

_SEVERITY = {
    Severity.ERROR: types.DiagnosticSeverity.Error,
    Severity.WARNING: types.DiagnosticSeverity.Warning,
    Severity.INFO: types.DiagnosticSeverity.Hint,
}
_NEEDLESS = ("KT302", "KT111")
"""What can be taken out without loss: editors show it faded."""

Uris = Callable[[str], str]
"""The URI of a file's path."""


def published(analysis: Analysis, uri_of: Uris) -> list[types.Diagnostic]:
    """All that the editor is to show of a file."""
    found = [finding(d, analysis, uri_of) for d in analysis.diagnostics[:MOST]]
    return [*(_problem(p, analysis.shown) for p in analysis.problems), *found]


def _problem(problem: Problem, shown: Shown) -> types.Diagnostic:
    return types.Diagnostic(
        range=_on_one_line(shown, problem.span), message=problem.message, severity=types.DiagnosticSeverity.Warning, source=SOURCE
    )


def finding(d: Diagnostic, analysis: Analysis, uri_of: Uris) -> types.Diagnostic:
    elsewhere = d.file != analysis.path
    span = analysis.import_of(d.file) if elsewhere else d.span
    message = f"{d.message}\n{d.help}" if d.help else d.message
    if d.models:
        message = f"{message}\n(on {', '.join(d.models)})"
    related = [(r.message, r.origin) for r in d.related]
    if elsewhere:
        message = f"in {Path(d.file).name}, line {d.span.start.line}: {message}"
        related.insert(0, ("found here", Origin(d.file, d.span)))
    return types.Diagnostic(
        range=_on_one_line(analysis.shown, span),
        message=message,
        severity=_SEVERITY[d.severity],
        code=d.code,
        code_description=types.CodeDescription(page_uri(d.code)) if d.code in ktopt.codes.CODES else None,
        source=SOURCE,
        tags=[types.DiagnosticTag.Unnecessary] if d.code in _NEEDLESS else None,
        related_information=[
            types.DiagnosticRelatedInformation(location(origin, analysis, uri_of), text) for text, origin in related
        ],
    )


def location(origin: Origin, analysis: Analysis, uri_of: Uris) -> types.Location:
    """A place in the file or in one that it imports."""
    if origin.file == analysis.path:
        return types.Location(uri_of(origin.file), analysis.shown.range(origin.span))
    sources: Mapping[str, SourceFile] = analysis.check.sources if analysis.check is not None else {}
    text = sources[origin.file].text if origin.file in sources else ""
    shown = Shown.of(Text(text, analysis.shown.text.encoding), origin.file)
    return types.Location(uri_of(origin.file), shown.range(origin.span))


def _on_one_line(shown: Shown, span: Span) -> types.Range:
    """A finding's range: of a span over several lines the first alone, and of an empty one what follows on its line."""
    found = shown.range(span)
    end = shown.text.position(shown.text.line_end(found.start.line)) if found.start.line < shown.text.line_count else found.end
    if found.end.line > found.start.line or found.end == found.start:
        return types.Range(found.start, end)
    return found


def file_uri(path: str) -> str:
    """The URI of a path that no open document has."""
    return from_fs_path(path) or Path(path).as_posix()


@cache
def _lines() -> dict[str, int]:
    """The line, from 1, at which each code's page begins."""
    text = _pages().read_text(encoding="utf-8")
    return {line.split()[1]: number for number, line in enumerate(text.splitlines(), 1) if line.startswith("# KT")}


def _pages() -> Path:
    return Path(ktopt.codes.__file__).with_name("codes.md")


def page_uri(code: str) -> str:
    """Where a code's page stands in the installed package: a file, and its line as editors write it."""
    return f"{_pages().as_uri()}#L{_lines().get(code, 1)}"
