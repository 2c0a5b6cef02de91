"""What was checked, beside what was found: so that a format can list what passed, and what didn't run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ktopt.diagnostics import Diagnostic, Severity


@dataclass(frozen=True)
class Checked:
    """One file, checked on one model ("" for none): its findings, and the check classes (KT3, ...) that did not run, with why."""

    file: str
    model: str = ""
    diagnostics: tuple[Diagnostic, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A whole run: every file on every model, and from which severity a finding fails it (None for never)."""

    checked: tuple[Checked, ...] = ()
    fail_on: Severity | None = Severity.ERROR
