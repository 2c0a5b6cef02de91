"""Rule files as text, for tests: parsed, validated, and their findings by line."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from ktopt.diagnostics import Diagnostic, Report
from ktopt.parse import parse
from ktopt.ruleset import RuleSet
from ktopt.source import Document, SourceFile
from ktopt.validate import validate

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not beside this checkout")


def parsed(text: str, path: str = "rules.yaml") -> tuple[Document, Report]:
    report = Report()
    return parse(SourceFile(path, text), report), report


def validated(text: str, path: str = "rules.yaml") -> tuple[RuleSet | None, Report]:
    document, report = parsed(dedent(text), path)
    return validate(document, report), report


def only(report: Report) -> Diagnostic:
    """The one finding of a report."""
    assert len(report) == 1, [str(d) for d in report]
    return report.items[0]


def lines(report: Report) -> list[tuple[str, int]]:
    return [(d.code, d.span.start.line) for d in report.sorted()]
