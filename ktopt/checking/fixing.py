"""Fixes applied to a rule file: edits that don't overlap, the result checked again, until there is nothing left to mend.

Nothing is written here but by `write_atomically`: a fix is first made in memory, and dropped where the file would no longer parse.
"""

from __future__ import annotations

import os
import re
from bisect import bisect, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ktopt.diagnostics import Diagnostic, Edit, Fix, KtoptError, Report
from ktopt.parse.compose import Budget, compose
from ktopt.source import SourceFile

MAX_ROUNDS = 100
"""A fix can bring another finding to light, which is mended in the next round. Real files need two or three, but YAML stops at the
first wrong escape of many."""

Check = Callable[[SourceFile], Sequence[Diagnostic]]


@dataclass(frozen=True)
class Fixed:
    """A file after fixing.

    source   its text as it now is
    applied  the findings that were mended, in order
    left     the findings of the text as it now is
    settled  False where fixes undo each other, or go on without end; the text is then the first one
    """

    source: SourceFile
    applied: tuple[Diagnostic, ...]
    left: tuple[Diagnostic, ...]
    settled: bool = True


def fix_source(source: SourceFile, check: Check, *, unsafe: bool = False) -> Fixed:
    """Mend what can be mended. `check` gives the findings of a text; `unsafe` also takes fixes that guess what was meant."""
    first, applied = source, list[Diagnostic]()
    seen = {source.text}
    found = at_first = tuple(check(source))
    for _ in range(MAX_ROUNDS):
        chosen = _that_parse(source, choose(source, found, unsafe))
        if not chosen:
            return Fixed(source, tuple(applied), found)
        text = apply_edits(source, _edits(chosen))
        if text in seen:
            break
        seen.add(text)
        applied += chosen
        source = SourceFile(source.path, text)
        found = tuple(check(source))
    return Fixed(first, (), at_first, settled=False)


def usable(diagnostic: Diagnostic, file: str, unsafe: bool) -> Fix | None:
    """The finding's fix where it has one that may be applied, and that edits `file` only."""
    fix = diagnostic.fix
    if fix is None or not (fix.safe or unsafe) or any(edit.file != file for edit in fix.edits):
        return None
    return fix


def choose(source: SourceFile, diagnostics: Iterable[Diagnostic], unsafe: bool = False) -> list[Diagnostic]:
    """The findings whose fixes can be applied together: of fixes that overlap, the one that begins first."""
    ready = [(d, fix) for d in diagnostics if (fix := usable(d, source.path, unsafe)) and fix.edits]
    chosen: list[Diagnostic] = []
    taken: list[tuple[int, int]] = []
    for diagnostic, fix in sorted(ready, key=lambda pair: (min(e.span.start for e in pair[1].edits), pair[0].sort_key)):
        places = [(source.offset(e.span.start), source.offset(e.span.end)) for e in fix.edits]
        if all(_is_free(place, taken) for place in places) and all(_is_free(a, [b]) for a, b in combinations(places, 2)):
            for place in places:
                insort(taken, place)
            chosen.append(diagnostic)
    return chosen


def _is_free(place: tuple[int, int], taken: list[tuple[int, int]]) -> bool:
    """Whether a stretch meets none of others that are sorted and don't meet each other."""
    at = bisect(taken, place)
    return not any(_overlap(place, other) for other in taken[max(0, at - 1) : at + 1])


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two stretches share a character. An insertion, which is empty, also meets what it touches: order would matter."""
    if a[0] == a[1] or b[0] == b[1]:
        return a[0] <= b[1] and b[0] <= a[1]
    return a[0] < b[1] and b[0] < a[1]


def _edits(diagnostics: Iterable[Diagnostic]) -> list[Edit]:
    return [edit for d in diagnostics if d.fix is not None for edit in d.fix.edits]


def apply_edits(source: SourceFile, edits: Iterable[Edit]) -> str:
    """The text with edits made that don't overlap. New lines end as the file's own do."""
    ending = "\r\n" if "\r\n" in source.text else "\n"
    parts, last = [], 0
    for edit in sorted(edits, key=lambda e: (e.span.start, e.span.end)):
        parts += [source.text[last : source.offset(edit.span.start)], edit.text.replace("\n", ending)]
        last = source.offset(edit.span.end)
    return "".join([*parts, source.text[last:]])


def _that_parse(source: SourceFile, chosen: list[Diagnostic]) -> list[Diagnostic]:
    """Those whose fixes leave the file as readable as it is: all of them at once where that goes well, else by halves."""
    before = _unreadable(source)

    def add(kept: list[Diagnostic], more: list[Diagnostic]) -> list[Diagnostic]:
        if not more or _unreadable(_with(source, [*kept, *more])) <= before:
            return [*kept, *more]
        if len(more) == 1:
            return kept
        half = len(more) // 2
        return add(add(kept, more[:half]), more[half:])

    return add([], chosen)


def _with(source: SourceFile, diagnostics: list[Diagnostic]) -> SourceFile:
    return SourceFile(source.path, apply_edits(source, _edits(diagnostics)))


def _unreadable(source: SourceFile) -> tuple[bool, int]:
    """How badly a text reads as YAML: whether not at all, and how many errors it has."""
    report = Report()
    root = compose(source, report, Budget())
    return root is None, len(report.errors)


def unified_diff(before: SourceFile, after: str) -> str:
    """What changed, as `diff -u` says it; "" for nothing."""
    from difflib import unified_diff as lines

    made = lines(_lines(before.text), _lines(after), before.path, before.path)
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in made)


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def write_atomically(before: SourceFile, text: str) -> None:
    """Put `text` in the place of a file, whole or not at all; its mode and byte order mark stay. KtoptError where the file can't be
    written, or is no longer what `before` holds."""
    import shutil
    import tempfile

    target = os.path.realpath(before.path)
    made = ""
    try:
        with open(target, "rb") as file:
            data = file.read()
        mark = b"\xef\xbb\xbf" if data.startswith(b"\xef\xbb\xbf") else b""
        if data != mark + before.text.encode():
            raise KtoptError(f"{before.path}: changed while it was checked; nothing was written")
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(target), prefix=".ktopt-", delete=False) as new:
            made = new.name
            new.write(mark + text.encode())
            new.flush()
            os.fsync(new.fileno())
        shutil.copymode(target, made)
        os.replace(made, target)
    except OSError as error:
        if made:
            os.unlink(made)
        raise KtoptError(f"{before.path}: can't be written: {error.strerror or error}") from None
