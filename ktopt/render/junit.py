"""Findings as JUnit XML: a test case for each file, model and class of checks, so that a green run lists what passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ktopt.codes import CLASSES
from ktopt.diagnostics import Diagnostic
from ktopt.render.checked import Checked
from ktopt.render.style import printable


class _Suite(NamedTuple):
    """A test suite as text, and how many cases, failures and skipped ones it has."""

    text: str
    cases: int
    failures: int
    skipped: int


def junit(diagnostics: Sequence[Diagnostic], checked: Sequence[Checked]) -> str:
    suites = [_suite(one) for one in checked or _by_file(diagnostics)]
    counts = _counts(sum(s.cases for s in suites), sum(s.failures for s in suites), sum(s.skipped for s in suites))
    body = "".join(suite.text for suite in suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="ktopt check" {counts}>\n{body}</testsuites>\n'


def _counts(cases: int, failures: int, skipped: int) -> str:
    return f'tests="{cases}" failures="{failures}" skipped="{skipped}" errors="0" time="0"'


def _by_file(diagnostics: Sequence[Diagnostic]) -> tuple[Checked, ...]:
    """For a list of findings alone: its files, each of whose checks ran."""
    files = dict.fromkeys(d.file for d in diagnostics)
    return tuple(Checked(file, diagnostics=tuple(d for d in diagnostics if d.file == file)) for file in files)


def _suite(checked: Checked) -> _Suite:
    name = f"{checked.file} on {checked.model}" if checked.model else checked.file
    cases, failures, skipped = [], 0, 0
    for prefix, title in CLASSES.items():
        found = [d for d in checked.diagnostics if d.code.startswith(prefix)]
        failing = [d for d in found if checked.fail_on is not None and d.severity.is_at_least(checked.fail_on)]
        why = "" if found else checked.skipped.get(prefix, "")
        failures, skipped = failures + bool(failing), skipped + bool(why)
        cases.append(_case(name, f"{prefix} {title}", found, failing, why))
    head = f"  <testsuite name={_quoted(name)} {_counts(len(cases), failures, skipped)}>\n"
    return _Suite(head + "".join(cases) + "  </testsuite>\n", len(cases), failures, skipped)


def _case(suite: str, name: str, found: list[Diagnostic], failing: list[Diagnostic], why: str) -> str:
    inside = ""
    if why:
        inside += f"      <skipped message={_quoted(why)}/>\n"
    if failing:
        worst, more = failing[0], len(failing) - 1
        message = f"{worst.code}: {worst.message}" + (f" (and {more} more)" if more else "")
        inside += f"      <failure type={_quoted(worst.code)} message={_quoted(message)}>{_text(_lines(failing))}</failure>\n"
    others = [d for d in found if d not in failing]
    if others:
        inside += f"      <system-out>{_text(_lines(others))}</system-out>\n"
    head = f'    <testcase classname={_quoted(suite)} name={_quoted(name)} time="0"'
    return f"{head}>\n{inside}    </testcase>\n" if inside else f"{head}/>\n"


def _lines(diagnostics: Sequence[Diagnostic]) -> str:
    return "\n".join(f"{d}" + (f"\n  help: {d.help}" if d.help else "") for d in diagnostics)


def _text(text: str) -> str:
    """Text of an element. XML can't hold most control characters at all, so `printable` comes first."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _quoted(text: str) -> str:
    return '"' + _text(" ".join(text.split("\n"))).replace('"', "&quot;") + '"'
