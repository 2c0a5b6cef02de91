"""What `ktopt check` does to files: --fix, --unsafe-fixes, --diff and --add-ignore."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TextIO

from ktopt.checking import FileCheck, can_be_ignored, check_file
from ktopt.checking.fixing import Fixed, fix_source, unified_diff, write_atomically
from ktopt.cli.terminal import style_of
from ktopt.diagnostics import Diagnostic, Report, Severity
from ktopt.parse.compose import Budget, compose
from ktopt.render import FOR_PEOPLE
from ktopt.render.style import plural, printable
from ktopt.source import SourceFile, plain

if TYPE_CHECKING:
    from ktopt.cli.check import Session


def mend(session: Session, checks: list[FileCheck]) -> int:
    """Do what the options ask for, print what is left, and return the exit code."""
    if session.args.add_ignore:
        return _add_ignores(session, checks)
    fixed = [_fix(check, session.args.unsafe_fixes) for check in checks]
    if session.args.diff:
        return _diff(checks, fixed)
    on_stdin = session.stdin is not None
    if on_stdin:
        text = fixed[0].source if fixed[0] else session.stdin
        assert text is not None
        sys.stdout.write(text.text)
        session.stdin = text
    else:
        for check, made in zip(checks, fixed, strict=True):
            if made is not None and check.source is not None and made.applied:
                write_atomically(check.source, made.source.text)
    stream = sys.stderr if on_stdin or session.format not in FOR_PEOPLE else sys.stdout
    _say_fixed(fixed, stream)
    left = session.check_all() if any(made and made.applied for made in fixed) else checks
    session.print(left, sys.stderr if on_stdin else None)
    return 1 if any(check.failing for check in left) else 0


def _fix(check: FileCheck, unsafe: bool) -> Fixed | None:
    """A file's fixes, made in memory; None where it couldn't be read."""
    if check.source is None:
        return None
    first = check.source.text

    def again(source: SourceFile) -> Sequence[Diagnostic]:
        if source.text == first:
            return check.diagnostics
        return check_file(source, check.target, is_imported=check.is_imported).diagnostics

    return fix_source(check.source, again, unsafe=unsafe)


def _say_fixed(fixed: Sequence[Fixed | None], stream: TextIO) -> None:
    """A line for each finding mended, and one that counts them."""
    style = style_of(stream)
    done = [d for made in fixed if made is not None for d in made.applied]
    for d in done:
        start = d.span.start
        place = f"{printable(d.file)}:{start.line}:{start.column}:"
        print(f"{place} {style.paint(f'{d.code} fixed', 'green')}: {d.fix.title if d.fix else ''}", file=stream)
    for made in fixed:
        if made is not None and not made.settled:
            print(f"{made.source.path}: fixes undo each other here; the file is left as it was", file=stream)
    if done:
        files = plural(len({d.file for d in done}), "file")
        print(style.paint(f"Fixed {plural(len(done), 'finding')} in {files}.", "green") + "\n", file=stream)


def _diff(checks: Sequence[FileCheck], fixed: Sequence[Fixed | None]) -> int:
    """Print what fixing would change. Exit code 1 where it would change something, or what it leaves fails the run."""
    changes = 0
    for check, made in zip(checks, fixed, strict=True):
        if check.source is not None and made is not None and made.applied:
            sys.stdout.write(unified_diff(check.source, made.source.text))
            changes += len(made.applied)
    left = [d for c, made in zip(checks, fixed, strict=True) for d in (made.left if made else c.diagnostics) if c.fails(d)]
    would = f"{plural(changes, 'finding')} would be fixed" if changes else "nothing would be fixed"
    print(f"{would}, {plural(len(left), 'other')} left." if left else f"{would}.", file=sys.stderr)
    return 1 if changes or left else 0


def _add_ignores(session: Session, checks: Sequence[FileCheck]) -> int:
    """Write an ignore comment at each finding that is shown, and print those for which there is no place."""
    from ktopt.suppress import add_ignores

    total, files, refused = 0, 0, 0
    for check in checks:
        if check.source is None:
            continue
        lowest = Severity.INFO if check.target.fail_on is Severity.INFO else Severity.WARNING
        refused += sum(1 for d in check.diagnostics if d.stops_plan)
        wanted = [d for d in check.diagnostics if d.severity.is_at_least(lowest) and can_be_ignored(d)]
        text, added = add_ignores(check.source, wanted, partial(_means, _meaning(check.source)))
        if added:
            write_atomically(check.source, text)
            total, files = total + added, files + 1
    stream = sys.stdout if session.format in FOR_PEOPLE else sys.stderr
    print(f"Added ignores for {plural(total, 'finding')} in {plural(files, 'file')}.", file=stream)
    if refused:
        print(f"What stops the plan can't be ignored, only mended: {plural(refused, 'error')}.", file=stream)
    left = session.check_all()
    session.print(left)
    return 1 if any(check.failing for check in left) else 0


def _means(meaning: str, text: str) -> bool:
    return _meaning(SourceFile("", text)) == meaning


def _meaning(source: SourceFile) -> str:
    """What a YAML text says, without comments: two texts of one meaning give one string."""
    report = Report()
    return repr((plain(compose(source, report, Budget())), len(report)))
