"""A rule file checked as a project wants it: on several models, with its ignore comments and its choice of codes.

`check_file` runs the stages (compiler.py) once a model, silences what comments silence, adds what is to be said of the comments
themselves, and joins the findings of all models, noting which of them each concerns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ktopt.checking.settings import ALL_CODES, UNREADABLE, CodeFilter
from ktopt.compiler import Compilation, run_stages
from ktopt.diagnostics import Diagnostic, Report, Severity
from ktopt.parse import parse
from ktopt.render.checked import Checked
from ktopt.source import SourceFile

if TYPE_CHECKING:
    from ktopt.suppress import Suppressions

TREE = {f"KT{n}" for n in (301, 302, 303, 305, 306, 307, 309, 311, 312, 407, 502, 503, 505, 601, 602, 603)}
"""Codes that are found on a model's tree; the others need the text only, or the plan as well."""
PLANNED = {"KT501", "KT504", "KT507"}
"""Codes that the machine decides, once there is a plan. A misspelt device is found without."""


@dataclass(frozen=True)
class Target:
    """What files are checked on, and how.

    models   each model's name and tree; none checks what needs no tree
    options  further keyword arguments of run_stages
    codes    which codes are reported
    fail_on  the severity from which a finding fails the run; None for never
    locked   whether the plan is compared with the file's lock
    """

    models: tuple[tuple[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    codes: CodeFilter = ALL_CODES
    fail_on: Severity | None = Severity.ERROR
    locked: bool = False


@dataclass(frozen=True)
class FileCheck:
    """One file on all its models.

    source        its text; None where it couldn't be read
    sources       the texts of it and all that it imports, by path
    diagnostics   what is reported, by place, each once
    compilations  what the stages made, by model; one, named "", where there is no model
    checked       what was found on each model
    is_imported   another file of the same run imports it
    is_config     it is a long-context config, which no stage takes
    """

    file: str
    source: SourceFile | None
    sources: Mapping[str, SourceFile]
    diagnostics: tuple[Diagnostic, ...]
    compilations: Mapping[str, Compilation]
    checked: tuple[Checked, ...]
    target: Target
    is_imported: bool = False
    is_config: bool = False

    def fails(self, diagnostic: Diagnostic) -> bool:
        """Whether a finding fails the run."""
        level = self.target.fail_on
        return level is not None and diagnostic.severity.is_at_least(level)

    @property
    def failing(self) -> list[Diagnostic]:
        """The findings that fail the run."""
        return [d for d in self.diagnostics if self.fails(d)]


def check_file(source: SourceFile, target: Target, *, is_imported: bool = False) -> FileCheck:
    """Check a rule file's text. Ignore comments of a file that others of the same run import may be for those, and are never called
    unused."""
    trees = target.models or (("", None),)
    config = _as_config(source)
    compilations = {name: config or run_stages(source, tree, **target.options) for name, tree in trees}
    sources: dict[str, SourceFile] = {}
    for compilation in compilations.values():
        sources |= compilation.document.sources
    comments = _comments(sources, compilations)
    found = {
        name: [d for d in (*c.report.sorted(), *_lock(c, target)) if not (d.file in comments and comments[d.file].silences(d))]
        for name, c in compilations.items()
    }
    about = _about_comments(source, comments, compilations, target, is_imported)
    kept = {name: target.codes.apply(sorted([*ds, *about], key=lambda d: d.sort_key)) for name, ds in found.items()}
    checked = tuple(
        Checked(source.path, name, tuple(ds), _skipped(compilations[name], target, config is not None), target.fail_on)
        for name, ds in kept.items()
    )
    return FileCheck(
        source.path, source, sources, tuple(_joined(kept)), compilations, checked, target, is_imported, config is not None
    )


def _as_config(source: SourceFile) -> Compilation | None:
    """The check of a long-context config file, which knows of no stage and no model; None for any other file."""
    if not ("model" in source.text or "long_context" in source.text or "kvc2" in source.text):
        return None
    from ktopt.config_file import check_config, is_config, may_be_config

    if not may_be_config(source):
        return None
    report = Report()
    document = parse(source, report)
    if not is_config(document):
        return None
    check_config(document, report)
    return Compilation(document, None, None, None, None, report)


def unreadable(file: str, diagnostics: Iterable[Diagnostic], target: Target) -> FileCheck:
    """The result for a file whose text can't be had."""
    found = tuple(diagnostics)
    names = [name for name, _ in target.models] or [""]
    checked = tuple(Checked(file, name, found, _not_reached(), target.fail_on) for name in names)
    return FileCheck(file, None, {}, found, {}, checked, target)


def _comments(sources: Mapping[str, SourceFile], compilations: Mapping[str, Compilation]) -> dict[str, Suppressions]:
    """The ignore comments of each file that could be parsed and may have some."""
    parsed = all(c.document.root is not None for c in compilations.values())
    if not parsed or not any("ktopt" in source.text for source in sources.values()):
        return {}
    from ktopt.suppress import read_suppressions

    return {path: read_suppressions(source) for path, source in sources.items()}


def _about_comments(
    source: SourceFile,
    comments: Mapping[str, Suppressions],
    compilations: Mapping[str, Compilation],
    target: Target,
    is_imported: bool,
) -> list[Diagnostic]:
    """KT112 for every file's comments, and KT111 for the file's own."""
    found = [d for suppressions in comments.values() for d in suppressions.problems]
    own = comments.get(source.path)
    if own is not None and not is_imported:
        found += own.unused(lambda code: target.codes.takes(code) and _was_sought(code, compilations.values(), target))
    return found


def _was_sought(code: str, compilations: Iterable[Compilation], target: Target) -> bool:
    """Whether a run would have found the code's findings, on every model."""
    if code in TREE:
        return all(c.matches is not None for c in compilations)
    if code == ("KT507" if target.options.get("context") is None else "KT504"):  # of a device one of them is said
        return False
    if code in PLANNED:
        return target.options.get("hardware") is not None and all(c.plan is not None for c in compilations)
    if code == "KT604":
        return target.locked and all(c.plan is not None for c in compilations)
    if code.startswith("KT7"):
        return target.options.get("weights") is not None and all(c.matches is not None for c in compilations)
    return True


def _lock(compilation: Compilation, target: Target) -> list[Diagnostic]:
    """What differs from the file's lock, where that is asked for and there is a plan."""
    if not target.locked or compilation.plan is None or compilation.ruleset is None:
        return []
    from ktopt.locking import check_lock

    return check_lock(compilation.ruleset, compilation.plan)


def _skipped(compilation: Compilation, target: Target, is_config: bool) -> dict[str, str]:
    """The classes of checks that did not run on a model, and why."""
    if is_config:
        return dict.fromkeys(("KT3", "KT4", "KT5", "KT6", "KT7"), "a config has no rules")
    if compilation.document.root is None:
        return _not_reached()
    if not target.models:
        return {**dict.fromkeys(("KT3", "KT5", "KT6"), "needs --model"), "KT7": "needs --weights"}
    if compilation.matches is None:
        return {code: why for code, why in _not_reached().items() if code not in ("KT2", "KT4")}
    return {} if target.options.get("weights") is not None else {"KT7": "needs --weights"}


def _not_reached() -> dict[str, str]:
    return dict.fromkeys(("KT2", "KT3", "KT4", "KT5", "KT6", "KT7"), "not reached: errors in the file stop the check before it")


def _joined(found: Mapping[str, list[Diagnostic]]) -> list[Diagnostic]:
    """The findings of all models, those that say the same at the same place once. What isn't found on all says on which; a fix that
    isn't the same on all is left out, and a guess at what a selection should be where it is right on another model."""
    alike: dict[Any, list[tuple[str, Diagnostic]]] = {}
    for name, diagnostics in found.items():
        for d in diagnostics:
            alike.setdefault((d.code, d.severity, d.message, d.file, d.span), []).append((name, d))
    joined = []
    for entries in alike.values():
        names = tuple(dict.fromkeys(name for name, _ in entries))
        first = entries[0][1]
        everywhere = len(names) == len(found)
        fix = first.fix if all(d.fix == first.fix for _, d in entries) else None
        if fix is not None and not fix.safe and not everywhere and first.code.startswith("KT3"):
            fix = None
        joined.append(replace(first, models=() if everywhere else names, fix=fix))
    return sorted(joined, key=lambda d: d.sort_key)


def can_be_ignored(diagnostic: Diagnostic) -> bool:
    """Whether a comment can silence the finding: a plan can be made with it, and it isn't about comments itself."""
    return not diagnostic.stops_plan and diagnostic.code not in (*UNREADABLE, "KT111", "KT112")
