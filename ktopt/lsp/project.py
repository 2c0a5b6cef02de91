"""What a file is checked on: the models, machine and codes that its project, the editor, or a comment in the file ask for.

Key by key, a comment in the file (`# ktopt: model=deepseek-v3`, models only) goes before the editor's settings, and these before
[tool.ktopt] in pyproject.toml, as `ktopt check` takes its command line before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktopt.checking.settings import ALL_CODES, CodeFilter, Settings, SettingsFinder, check_prefixes
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.models.shipped import known_models
from ktopt.source import FILE_START, SourceFile, Span

MODELINE = re.compile(r"^[ \t]*#[ \t]*ktopt:[ \t]*models?[ \t]*=[ \t]*([^\s#][^#\n]*)", re.MULTILINE)
LISTS = ("models", "select", "ignore")


@dataclass(frozen=True)
class Problem:
    """Something that keeps a file from being checked as asked for, and where the file asks for it."""

    message: str
    span: Span = FILE_START


@dataclass(frozen=True)
class Wanted:
    """What a file is to be checked on: names of models, a machine's name, the codes that are reported."""

    models: tuple[str, ...] = ()
    hardware: str | None = None
    codes: CodeFilter = ALL_CODES
    problems: tuple[Problem, ...] = ()
    span: Span = FILE_START


@dataclass
class Project:
    """Finds what is wanted of each file.

    root     the editor's workspace folder, where it has one
    editor   the settings that the editor sends
    """

    root: Path | None = None
    editor: Settings = field(default_factory=Settings)
    finder: SettingsFinder = field(default_factory=SettingsFinder)
    editor_problems: tuple[str, ...] = ()

    def forget(self) -> None:
        """Read every pyproject.toml again at its next use."""
        self.finder = SettingsFinder()

    def configure(self, value: Any) -> None:
        """Take the editor's settings: `models`, `hardware`, `select` and `ignore`, by themselves or under `ktopt`."""
        self.editor, self.editor_problems = read_editor_settings(value, self.root)

    def wanted(self, source: SourceFile, path: str) -> Wanted:
        """What the file asks for. What is wrong with any settings is among the problems."""
        problems = [Problem(message) for message in self.editor_problems]
        try:
            project = self.finder.of(path)
        except KtoptError as error:
            project = Settings()
            problems.append(Problem(str(error)))
        editor = self.editor
        models = editor.models if editor.models is not None else project.models or ()
        span = FILE_START
        modeline = MODELINE.search(source.text) if "ktopt" in source.text else None
        if modeline is not None:
            span = Span(source.position(modeline.start(1)), source.position(modeline.start(1) + len(modeline[1].rstrip())))
            models = self.named(modeline[1], span, Path(path).parent, problems)
        codes = CodeFilter(
            editor.select if editor.select is not None else project.select or (),
            editor.ignore if editor.ignore is not None else project.ignore or (),
        )
        return Wanted(tuple(dict.fromkeys(models)), editor.hardware or project.hardware, codes, tuple(problems), span)

    def named(self, text: str, span: Span, folder: Path, problems: list[Problem]) -> tuple[str, ...]:
        """The models that a comment names: shipped ones, or files below the file's folder or the workspace. A stranger's file must
        not make the server read others."""
        found = []
        for name in (part.strip() for part in text.split(",") if part.strip()):
            there = (folder / name).resolve()
            if name in known_models():
                found.append(name)
            elif there.exists() and any(there.is_relative_to(top.resolve()) for top in (folder, self.root) if top is not None):
                found.append(str(there))
            else:
                shipped = ", ".join(known_models())
                problems.append(Problem(f"{name} is no shipped model ({shipped}), nor a file or folder of this project", span))
        return tuple(found)


def read_editor_settings(value: Any, root: Path | None) -> tuple[Settings, tuple[str, ...]]:
    """The settings in what an editor sends, and what is wrong with them. Keys that aren't ours are the editor's own."""
    table = value.get("ktopt", value) if isinstance(value, Mapping) else None
    if not isinstance(table, Mapping):
        return Settings(), ()
    problems: list[str] = []
    lists: dict[str, tuple[str, ...] | None] = {}
    for key in LISTS:
        given = table.get(key)
        items = [given] if isinstance(given, str) else given
        good = isinstance(items, list) and all(isinstance(item, str) for item in items)
        if items is not None and not good:
            problems.append(f"the editor's setting ktopt.{key} must be a list of strings")
        lists[key] = tuple(item for item in items if item) if good and items is not None else None
    hardware = table.get("hardware")
    if hardware is not None and not isinstance(hardware, str):
        problems.append("the editor's setting ktopt.hardware must be a string")
        hardware = None
    for key in ("select", "ignore"):
        try:
            check_prefixes(lists[key] or (), f"the editor's setting ktopt.{key}")
        except UsageError as error:
            problems.append(str(error))
            lists[key] = None
    models = None if lists["models"] is None else tuple(_below(root, model) for model in lists["models"])
    found = Settings(models, lists["select"], lists["ignore"], None, _below(root, hardware) if hardware else None)
    return found, tuple(problems)


def _below(root: Path | None, name: str) -> str:
    """A path relative to the workspace where there is such a file or folder; otherwise the name of something shipped."""
    there = root / name if root is not None else None
    return str(there) if there is not None and there.exists() else name
