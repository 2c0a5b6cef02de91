"""One text checked: what `ktopt check` finds in it, and what its rules take on each model. All answers of the server start here."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ktopt.checking import FileCheck, Target, check_file
from ktopt.checking.settings import CodeFilter
from ktopt.compiler import Compilation
from ktopt.diagnostics import Diagnostic
from ktopt.graph import ModuleGraph
from ktopt.lsp.models import Models
from ktopt.lsp.project import Problem, Project
from ktopt.lsp.text import BYTE_ORDER_MARK, Shown
from ktopt.match import Matches
from ktopt.placement import Hardware
from ktopt.ruleset import Rule, RuleSet
from ktopt.source import FILE_START, Document, Scalar, Sequence, Span
from ktopt.source import Mapping as YamlMapping
from ktopt.validate import keys as rule_keys

log = logging.getLogger(__name__)

_NAMES_US = re.compile(r"#[ \t]*ktopt:|ruleset\.schema\.json")
_REPLACEMENT = r"replace[ \t]*:[ \t]*(?:\r?\n[ \t]+(?:class|kwargs)[ \t]*:|[\w{])"
_RULE_KEY = re.compile(rf"(?:^[ \t]*(?:-[ \t]+)*|[{{,][ \t]*)(?:match[ \t]*:|{_REPLACEMENT})", re.MULTILINE)
_TOP_KEY = re.compile(r"^(?:rules|let|place|import)[ \t]*:", re.MULTILINE)
_VERSION = re.compile(r"^version[ \t]*:[ \t]*1[ \t]*(?:#.*)?\r?$", re.MULTILINE)
_FIRST = re.compile(r"^(?![ \t]*(?:#|---|%|\r?$))[ \t]*(\S)", re.MULTILINE)
_FIRST_COLUMN = re.compile(r"^(?![ \t#]|---|\r?$)(?:-[ \t]*)?([^\s:]*)", re.MULTILINE)


def looks_like_rules(text: str) -> bool:
    """Whether a YAML text seems to be a rule file. Editors send every YAML file that is opened, pipelines and charts among them."""
    text = text.removeprefix(BYTE_ORDER_MARK)
    if _NAMES_US.search(text):
        return True
    first = _FIRST.search(text)
    if first is None:
        return False
    if first[1] in "-[":
        return _RULE_KEY.search(text) is not None
    return _TOP_KEY.search(text) is not None and (_VERSION.search(text) is not None or _RULE_KEY.search(text) is not None)


def may_become_rules(text: str) -> bool:
    """Whether a text that is no rule file as yet may be the beginning of one: nothing in its first column says otherwise."""
    words = (found[1] for found in _FIRST_COLUMN.finditer(text.removeprefix(BYTE_ORDER_MARK)))
    keys = (*rule_keys.TOP, *rule_keys.LIST_RULE)
    return len(text) < 1000 and all(any(key.startswith(word) for key in keys) for word in words)


@dataclass(frozen=True)
class Analysis:
    """What is known of one version of a text.

    check      what `ktopt check` makes of it; None where ktopt itself failed
    problems   why it isn't checked as asked for
    pending    models whose trees are still being built
    target     what it was checked on
    """

    shown: Shown
    check: FileCheck | None = None
    problems: tuple[Problem, ...] = ()
    pending: tuple[str, ...] = ()
    target: Target = field(default_factory=Target)

    @property
    def path(self) -> str:
        return self.shown.source.path

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        return self.check.diagnostics if self.check is not None else ()

    @property
    def _first(self) -> Compilation | None:
        return next(iter(self.check.compilations.values()), None) if self.check is not None else None

    @property
    def document(self) -> Document | None:
        return self._first.document if self._first is not None else None

    @property
    def ruleset(self) -> RuleSet | None:
        return self._first.ruleset if self._first is not None else None

    @cached_property
    def rules(self) -> list[Rule]:
        """The rules that stand in the file itself, in its order."""
        return [r for r in self.ruleset.rules if r.origin.file == self.path] if self.ruleset is not None else []

    @cached_property
    def matches(self) -> dict[str, Matches]:
        """What the rules take, by model."""
        compilations: Mapping[str, Compilation] = self.check.compilations if self.check is not None else {}
        return {name: c.matches for name, c in compilations.items() if c.matches is not None}

    @property
    def graphs(self) -> dict[str, ModuleGraph]:
        """The trees that it was checked on, by name."""
        return dict(self.target.models)

    def rule_at(self, line: int) -> Rule | None:
        """The rule that stands on a line of the file."""
        return next((r for r in self.rules if r.origin.span.start.line <= line <= r.origin.span.end.line), None)

    def import_of(self, file: str) -> Span:
        """Where the file says that it imports another, directly or through a third; the file's start where it doesn't say."""
        document = self.document
        direct = next((d for d in document.imports if file in d.sources), None) if document is not None else None
        root = document.root if document is not None else None
        listed = root.get("import") if isinstance(root, YamlMapping) else None
        entries = listed.items if isinstance(listed, Sequence) else (listed,)
        for entry in entries:
            if direct is not None and isinstance(entry, Scalar) and self.imported_path(entry) == direct.source.path:
                return entry.span
        return FILE_START

    def imported_path(self, entry: Scalar) -> str:
        """The path of the file that an entry of `import` names."""
        return os.path.normpath(os.path.join(os.path.dirname(self.path), str(entry.value)))


class Analyser:
    """Checks texts on what their project asks for."""

    def __init__(self, project: Project, models: Models) -> None:
        self.project, self.models = project, models

    def analyse(self, shown: Shown, is_imported: bool = False) -> Analysis:
        """Check a text. Never raises: where ktopt itself fails, that is the analysis' one problem."""
        try:
            return self._analyse(shown, is_imported)
        except Exception as error:
            log.exception("%s: ktopt itself failed", shown.source.path)
            reason = f"ktopt itself failed on this file ({type(error).__name__}); please report it with what `ktopt check` says"
            return Analysis(shown, problems=(Problem(reason),))

    def _analyse(self, shown: Shown, is_imported: bool) -> Analysis:
        wanted = self.project.wanted(shown.source, shown.source.path)
        problems = list(wanted.problems)
        trees: list[tuple[str, Any]] = []
        pending = []
        for name in wanted.models:
            tree = self.models.tree(name)
            if isinstance(tree, str):
                problems.append(Problem(tree, wanted.span))
            elif tree is None:
                pending.append(name)
            else:
                trees.append((name, tree))
        hardware = self.models.machine(wanted.hardware) if wanted.hardware else None
        if isinstance(hardware, str):
            problems.append(Problem(hardware))
            hardware = None
        target = _target(trees, hardware, wanted.codes)
        check = check_file(shown.source, target, is_imported=is_imported)
        return Analysis(shown, check, tuple(problems), tuple(pending), target)


def _target(trees: list[tuple[str, Any]], hardware: Hardware | None, codes: CodeFilter) -> Target:
    """Without a machine there is nothing that making the plan would find."""
    return Target(tuple(trees), {"hardware": hardware, "plan": hardware is not None}, codes)
