"""Findings as GitHub workflow commands: each becomes an annotation at its line in the pull request."""

from __future__ import annotations

from collections.abc import Sequence

from ktopt.diagnostics import Diagnostic, Severity
from ktopt.render.style import printable

_COMMAND = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def github(diagnostics: Sequence[Diagnostic]) -> str:
    return "".join(_line(d) for d in diagnostics)


def _line(d: Diagnostic) -> str:
    start, end = d.span.start, d.span.end
    place = {"file": d.file, "line": start.line, "endLine": max(start.line, end.line)}
    if start.line == end.line:  # GitHub takes columns of one line only
        place |= {"col": start.column, "endColumn": max(start.column, end.column)}
    properties = ",".join(f"{key}={_property(str(value))}" for key, value in (place | {"title": f"{d.code} {d.severity}"}).items())
    start_of_line = f"{d.file}:{start.line}:{start.column}: {d.code} {d.message}"
    related = [f"{r.message} ({r.origin})" for r in d.related]
    models = [f"on {', '.join(d.models)}"] if d.models else []
    text = "\n".join([start_of_line, *models, *related, *([f"help: {d.help}"] if d.help else [])])
    return f"::{_COMMAND[d.severity]} {properties}::{_data(printable(text))}\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
