"""What can be done about a finding: its fix, an ignore comment, and all certain fixes of a file at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ktopt.checking import can_be_ignored, check_file
from ktopt.checking.fixing import apply_edits, fix_source, usable
from ktopt.diagnostics import Diagnostic, Edit, Report
from ktopt.lsp.analysis import Analysis
from ktopt.parse.compose import Budget, compose
from ktopt.source import SourceFile, Span, plain
from ktopt.suppress import add_ignores

MOST_IGNORES = 8
"""Ignore comments that are offered at once: each is tried on the whole file."""


@dataclass(frozen=True)
class Action:
    """A change that is offered: its title, the finding that it is for, and the text with the change made. `preferred` where it is
    certain to be right."""

    title: str
    diagnostic: Diagnostic
    text: str
    preferred: bool = False


def actions(analysis: Analysis, first: int, last: int) -> list[Action]:
    """What can be done about the findings that begin on the lines first to last, from 1."""
    source = analysis.shown.source
    here = [d for d in analysis.diagnostics if d.file == source.path and first <= d.span.start.line <= last]
    found = []
    for diagnostic in here:
        fix = usable(diagnostic, source.path, unsafe=True)
        if fix is not None:
            found.append(Action(_title(fix.title), diagnostic, apply_edits(source, fix.edits), fix.safe))
    return found + list(_ignores(source, here))


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ignores(source: SourceFile, here: Iterable[Diagnostic]) -> Iterable[Action]:
    offered: set[tuple[str, int]] = set()
    meaning = meaning_of(source.text)

    def same(text: str) -> bool:
        return meaning_of(text) == meaning

    for diagnostic in here:
        key = (diagnostic.code, diagnostic.span.start.line)
        if not can_be_ignored(diagnostic) or key in offered or len(offered) >= MOST_IGNORES:
            continue
        offered.add(key)
        text, count = add_ignores(source, [diagnostic], same)
        if count:
            yield Action(f"Ignore {diagnostic.code} on this line", diagnostic, text)


def meaning_of(text: str) -> str:
    """What a YAML text says, without its comments: texts of one meaning give one string."""
    report = Report()
    return repr((plain(compose(SourceFile("", text), report, Budget())), len(report)))


def fixed(analysis: Analysis) -> str:
    """The text with every certain fix made, and those that come to light by them."""
    first = analysis.shown.source.text

    def check(source: SourceFile) -> tuple[Diagnostic, ...]:
        return analysis.diagnostics if source.text == first else check_file(source, analysis.target).diagnostics

    return fix_source(analysis.shown.source, check).source.text


def has_fixes(analysis: Analysis) -> bool:
    """Whether there is anything that `fixed` would change."""
    return any(usable(d, analysis.path, unsafe=False) for d in analysis.diagnostics)


def change(source: SourceFile, text: str) -> Edit | None:
    """The one edit that makes a source into a text; None where they are the same."""
    old = source.text
    most = min(len(old), len(text))
    before = next((i for i in range(most) if old[i] != text[i]), most)
    after = next((i for i in range(most - before) if old[-1 - i] != text[-1 - i]), most - before)
    if before == len(old) == len(text):
        return None
    if old.startswith("\r\n", before - 1):
        before -= 1
    if after and old.startswith("\r\n", len(old) - after - 1):
        after -= 1
    span = Span(source.position(before), source.position(len(old) - after))
    return Edit(source.path, span, text[before : len(text) - after])
