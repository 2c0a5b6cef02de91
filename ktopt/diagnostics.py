"""What a stage has to say of a rule file: one record, Diagnostic, and a Report that collects them.

Stages add to a Report and go on where they can; the caller raises once, at the end of a stage, with all that was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ktopt.source import FILE_START, Origin, Position, Span


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    def is_at_least(self, other: Severity) -> bool:
        """Whether this is as grave as `other`, or graver."""
        order = list(Severity)
        return order.index(self) <= order.index(other)


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the text of `span` in `file` by `text`."""

    file: str
    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that mends a finding. `safe` when it cannot change what a right file means."""

    title: str
    edits: tuple[Edit, ...]
    safe: bool = True

    def to_json(self) -> dict[str, Any]:
        edits = [{"file": e.file, "span": span_json(e.span), "text": e.text} for e in self.edits]
        return {"title": self.title, "safe": self.safe, "edits": edits}


@dataclass(frozen=True, slots=True)
class Related:
    """Another place that explains the finding, such as the rule that took the modules."""

    message: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding: a code of codes.py, a message that says what is wrong, where, and in `help` what to write instead. `models`
    names those that it concerns where a file was checked on several and it isn't found on all."""

    code: str
    severity: Severity
    message: str
    file: str
    span: Span = FILE_START
    related: tuple[Related, ...] = ()
    help: str | None = None
    fix: Fix | None = None
    models: tuple[str, ...] = ()

    @property
    def stops_plan(self) -> bool:
        """Whether no plan can be made while it stands: an error of YAML, shape, operator, regex or selector (KT1, KT2, KT4, KT304,
        KT310). Neither a comment nor an option can silence such a one."""
        return self.severity is Severity.ERROR and (self.code.startswith(("KT1", "KT2", "KT4")) or self.code in ("KT304", "KT310"))

    @property
    def sort_key(self) -> tuple[str, Span, str, str]:
        return (self.file, self.span, self.code, self.message)

    def __str__(self) -> str:
        start = self.span.start
        return f"{self.file}:{start.line}:{start.column}: {self.code} {self.severity}: {self.message}"

    def to_json(self) -> dict[str, Any]:
        """The record of `--format json`."""
        return {
            "code": self.code,
            "severity": str(self.severity),
            "message": self.message,
            "file": self.file,
            "span": span_json(self.span),
            "related": [{"message": r.message, "file": r.origin.file, "span": span_json(r.origin.span)} for r in self.related],
            "help": self.help,
            "fix": self.fix.to_json() if self.fix else None,
            "models": list(self.models),
        }


def span_json(span: Span) -> dict[str, Any]:
    def position(p: Position) -> dict[str, int]:
        return {"line": p.line, "column": p.column}

    return {"start": position(span.start), "end": position(span.end)}


@dataclass
class Report:
    """The findings of a run, in the order found; `sorted()` orders them by place."""

    items: list[Diagnostic] = field(default_factory=list)
    _seen: set[Diagnostic] = field(default_factory=set, repr=False, compare=False)

    def add(self, diagnostic: Diagnostic) -> None:
        if diagnostic not in self._seen:
            self._seen.add(diagnostic)
            self.items.append(diagnostic)

    def report(
        self,
        code: str,
        severity: Severity,
        message: str,
        origin: Origin,
        *,
        help: str | None = None,
        related: Iterable[Related] = (),
        fix: Fix | None = None,
    ) -> None:
        self.add(Diagnostic(code, severity, message, origin.file, origin.span, tuple(related), help, fix))

    def error(self, code: str, message: str, origin: Origin, **rest: Any) -> None:
        self.report(code, Severity.ERROR, message, origin, **rest)

    def warning(self, code: str, message: str, origin: Origin, **rest: Any) -> None:
        self.report(code, Severity.WARNING, message, origin, **rest)

    def info(self, code: str, message: str, origin: Origin, **rest: Any) -> None:
        self.report(code, Severity.INFO, message, origin, **rest)

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        for diagnostic in diagnostics:
            self.add(diagnostic)

    def sorted(self) -> list[Diagnostic]:
        return sorted(self.items, key=lambda d: d.sort_key)

    @property
    def errors(self) -> list[Diagnostic]:
        return [d for d in self.items if d.severity is Severity.ERROR]

    @property
    def stops_plan(self) -> bool:
        """Whether a plan can't be made at all."""
        return any(d.stops_plan for d in self.items)

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class KtoptError(Exception):
    """An error that a user can act on: printed without a traceback. Every error that ktopt raises on purpose is one."""


class UsageError(KtoptError):
    """The command line or the API was called wrongly (exit code 2)."""


class CompileError(KtoptError):
    """The rules can't be compiled; `report` holds every finding."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__("\n".join(str(d) for d in report.sorted() if d.severity is Severity.ERROR))
