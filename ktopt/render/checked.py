"""What was checked, beside what was found: so that a format can list what passed, and what didn't run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ktopt.diagnostics import Diagnostic, Severity


@dataclass(frozen=True)
class Checked:
    """One file, checked on one model.

    model        its name, "" for none
    diagnostics  what was found
    skipped      check classes (KT3, ...) that did not run, and why
    fail_on      from which severity a finding fails the run; None for never
    """

    file: str
    model: str = ""
    diagnostics: tuple[Diagnostic, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    fail_on: Severity | None = Severity.ERROR
