"""`# ktopt: ignore[KT302] reason`: comments that silence findings.

At the end of a line it silences findings that begin on that line; on a line of its own, those of the next line that holds more than
a comment. An error without whose mending there is no plan stays (Diagnostic.stops_plan). An ignore that silences nothing is itself
reported (KT111), and one that can't be read, too (KT112).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property

from ktopt.codes import CODES
from ktopt.comments import Comment, comments, is_bare
from ktopt.diagnostics import Diagnostic, Edit, Fix, Severity
from ktopt.operator import nearest
from ktopt.source import Document, Position, SourceFile, Span

WORD = "ktopt"
_IGNORE = re.compile(r"#\s*ktopt:\s*ignore\b(\s*\[([^\]]*)\])?")
_ALMOST = re.compile(r"#\s*ktopt\b[\s:]*([A-Za-z-]+)\s*[\[(]\s*[A-Za-z]{2}\d", re.ASCII)
_CODE = re.compile(r"[A-Za-z]{2}\d{1,5}")
_EXAMPLE = "write `# ktopt: ignore[KT305] why`"
MAX_PROBLEMS, MAX_IGNORES = 50, 5000
"""After so many of a file, it isn't read further."""


@dataclass(frozen=True, slots=True)
class Code:
    """One code of an ignore comment, and where it stands in the text: offsets from 0."""

    code: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Ignore:
    """An ignore comment: its codes, the line that it silences (0 where nothing follows it), and where it stands in the text."""

    codes: tuple[Code, ...]
    line: int
    start: int
    end: int
    comment: Comment


@dataclass
class Suppressions:
    """The ignore comments of one file, which of their codes have silenced something, and which stand at an error that stops the
    plan, so that they can't."""

    source: SourceFile
    ignores: list[Ignore] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)
    used: set[Code] = field(default_factory=set)
    powerless: set[Code] = field(default_factory=set)

    @cached_property
    def by_line(self) -> dict[int, list[Code]]:
        """The codes that silence each line."""
        found: dict[int, list[Code]] = {}
        for ignore in self.ignores:
            found.setdefault(ignore.line, []).extend(ignore.codes)
        return found

    def silences(self, diagnostic: Diagnostic) -> bool:
        """Whether a comment silences a finding of this file; such a comment counts as used."""
        found = [code for code in self.by_line.get(diagnostic.span.start.line, ()) if code.code == diagnostic.code]
        if diagnostic.stops_plan:
            self.powerless.update(found)
            return False
        self.used.update(found)
        return bool(found)

    def unused(self, judged: Callable[[str], bool]) -> list[Diagnostic]:
        """KT111 for each code that has silenced nothing, where `judged` says that the run would have found its findings."""
        found = []
        for ignore in self.ignores:
            idle = [c for c in ignore.codes if c not in self.used and (c in self.powerless or judged(c.code))]
            if idle:
                found.append(self._unused(ignore, idle))
        return found

    def _unused(self, ignore: Ignore, idle: list[Code]) -> Diagnostic:
        names = ", ".join(code.code for code in idle)
        rest = [code.code for code in ignore.codes if code not in idle]
        where = f"line {ignore.line} has no such finding" if ignore.line else "no line follows it"
        if any(code in self.powerless for code in idle):
            where = "what stops the plan can't be ignored, only mended"
        if rest:
            title, edit = f"take {names} out", self.edit(ignore.codes[0].start, ignore.codes[-1].end, ", ".join(rest))
        else:
            title, edit = "delete the comment", self.deletion(ignore)
        span = self.span(idle[0].start, idle[-1].end)
        message = f"ignore[{names}] silences nothing: {where}"
        return Diagnostic("KT111", Severity.WARNING, message, self.source.path, span, help=title, fix=Fix(title, (edit,)))

    def deletion(self, ignore: Ignore) -> Edit:
        """Take the comment away, with its line where that holds nothing else."""
        start, end = ignore.start, ignore.end
        line_start = self.source.line_starts[ignore.comment.line - 1]
        before = self.source.text[line_start:start]
        if not before.strip():
            start = line_start
            end = self.source.offset(Position(ignore.comment.line + 1, 1))
        else:
            start = line_start + len(before.rstrip())
        return self.edit(start, end, "")

    def span(self, start: int, end: int) -> Span:
        return Span(self.source.position(start), self.source.position(end))

    def edit(self, start: int, end: int, text: str) -> Edit:
        return Edit(self.source.path, self.span(start, end), text)


def read_suppressions(source: SourceFile) -> Suppressions:
    """The ignore comments of a rule file that could be parsed."""
    found = Suppressions(source)
    written = comments(source, WORD)
    following = _following(source) if any(comment.alone for comment in written) else []
    for comment in written:
        if len(found.problems) >= MAX_PROBLEMS or len(found.ignores) >= MAX_IGNORES:
            break
        begin = source.line_starts[comment.line - 1] + comment.column - 1
        match = _IGNORE.search(comment.text)
        almost = None if match else _ALMOST.search(comment.text)
        if match:
            _read(found, comment, match, begin, following[comment.line] if comment.alone else comment.line)
        elif almost and (nearest(almost[1].lower(), ("ignore", "noqa", "disable", "suppress")) or "ignore" in almost[1].lower()):
            span = found.span(begin + almost.start(), begin + len(comment.text))
            _malformed(found, f"`{almost[1]}` is no comment that ktopt knows", span)
    return found


def _read(found: Suppressions, comment: Comment, match: re.Match[str], begin: int, line: int) -> None:
    whole = found.span(begin + match.start(), begin + match.end())
    if match[2] is None:
        _malformed(found, "an ignore needs the codes that it silences, in brackets", whole)
        return
    codes: dict[str, Code] = {}
    for part in re.finditer(r"[^,]+", match[2]):
        text = part[0].strip()
        start = begin + match.start(2) + part.start() + len(part[0]) - len(part[0].lstrip())
        if text.upper() in CODES:
            codes.setdefault(text.upper(), Code(text.upper(), start, start + len(text)))
        elif text and len(found.problems) < MAX_PROBLEMS:
            _malformed(found, _no_code(text), found.span(start, start + len(text)))
    if not match[2].strip(" ,"):
        _malformed(found, "an ignore needs the codes that it silences", whole)
    if codes:
        found.ignores.append(Ignore(tuple(codes.values()), line, begin + match.start(), begin + len(comment.text), comment))


def _no_code(text: str) -> str:
    near = next(iter(get_close_matches(text.upper(), CODES, 1, 0.8)), "") if _CODE.fullmatch(text) else ""
    return f"{text[:40]} is no code of a finding" + (f"; did you mean {near}?" if near else "")


def _malformed(found: Suppressions, message: str, span: Span) -> None:
    found.problems.append(Diagnostic("KT112", Severity.WARNING, message, found.source.path, span, help=_EXAMPLE))


def _following(source: SourceFile) -> list[int]:
    """By line number, the first line after it that holds more than a comment; 0 where there is none."""
    found = [0] * (len(source.lines) + 1)
    for number in range(len(source.lines) - 1, -1, -1):
        found[number] = found[number + 1] if is_bare(source.lines[number]) else number + 1
    return found


def unsilenced(document: Document, diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """The findings of a file and its imports that no comment silences."""
    if document.root is None:
        return list(diagnostics)
    known = {path: read_suppressions(source) for path, source in document.sources.items() if WORD in source.text}
    return [d for d in diagnostics if d.file not in known or not known[d.file].silences(d)]


def add_ignores(source: SourceFile, diagnostics: Iterable[Diagnostic], same: Callable[[str], bool]) -> tuple[str, int]:
    """The text with an ignore comment for each finding of this file, and how many findings they silence.

    A comment goes to the end of the finding's line, or on a line above it where that would change what the file means: `same` says
    whether a changed text still means the same.
    """
    wanted: dict[int, list[str]] = {}
    for diagnostic in diagnostics:
        if diagnostic.file == source.path:
            wanted.setdefault(diagnostic.span.start.line, []).append(diagnostic.code)
    text, count = source.text, 0
    for line, codes in sorted(wanted.items(), reverse=True):
        changed = next((t for t in _with_ignore(SourceFile(source.path, text), line, set(codes)) if same(t)), None)
        if changed is not None:
            text, count = changed, count + len(codes)
    return text, count


def _with_ignore(source: SourceFile, line: int, codes: set[str]) -> Iterable[str]:
    """Ways to write the ignores of one line, the best first."""
    if line > len(source.lines):
        return
    known = read_suppressions(source)
    present = [ignore for ignore in known.ignores if ignore.line == line]
    if present:
        listed = ", ".join(sorted({*(c.code for c in present[0].codes), *codes}))
        yield source.text[: present[0].codes[0].start] + listed + source.text[present[0].codes[-1].end :]
    start, end = source.line_starts[line - 1], source.offset(Position(line, len(source.lines[line - 1]) + 1))
    comment = f"# ktopt: ignore[{', '.join(sorted(codes))}]"
    written = source.text[start:end]
    yield source.text[:start] + written.rstrip() + f"  {comment}" + source.text[end:]
    ending = "\r\n" if "\r\n" in source.text else "\n"
    indent = written[: len(written) - len(written.lstrip())]
    yield source.text[:start] + indent + comment + ending + source.text[start:]
