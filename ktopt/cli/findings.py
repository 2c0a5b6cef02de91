"""Printing findings: with source lines, and a line at the end that counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from ktopt.cli.terminal import style_of
from ktopt.diagnostics import Diagnostic, Severity
from ktopt.render import render
from ktopt.render.checked import Checked
from ktopt.render.style import plural
from ktopt.source import SourceFile


def at_least(diagnostics: Iterable[Diagnostic], level: Severity) -> list[Diagnostic]:
    """Those of that severity or a graver one."""
    return [d for d in diagnostics if d.severity.is_at_least(level)]


def count(diagnostics: Iterable[Diagnostic]) -> str:
    """ "2 errors, 1 warning", or "" for none."""
    found = Counter(d.severity for d in diagnostics)
    return ", ".join(plural(found[s], str(s)) for s in (Severity.ERROR, Severity.WARNING, Severity.INFO) if found[s])


def print_report(
    diagnostics: Sequence[Diagnostic],
    stream: TextIO,
    sources: Mapping[str, SourceFile] | None = None,
    format: str = "full",
    checked: Sequence[Checked] = (),
) -> None:
    """Print findings with the lines they stand on; files that `sources` lacks are read where they can be. `checked` is what was
    looked at, for formats that list it."""
    known = dict(sources or {})
    if format in ("full", "sarif"):
        for path in {d.file for d in diagnostics} | {r.origin.file for d in diagnostics for r in d.related}:
            known.setdefault(path, _read(path))
    stream.write(render(diagnostics, format, sources=known, style=style_of(stream), checked=checked))


def _read(path: str) -> SourceFile:
    try:
        with open(path, encoding="utf-8") as file:
            return SourceFile(path, file.read(1 << 20))
    except (OSError, ValueError):
        return SourceFile(path, "")
