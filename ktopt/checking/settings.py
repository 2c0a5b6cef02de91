"""What a project says of checking in its pyproject.toml, under [tool.ktopt], and which codes are reported.

    [tool.ktopt]
    models = ["deepseek-v3", "models/ours/config.json"]
    select = ["KT3", "KT4"]
    ignore = ["KT303"]
    fail-on = "warning"
    hardware = "8x80GB+512GB"

A file's settings are those of the nearest pyproject.toml above it that has such a table; paths in it are relative to it. The
command line overrides each key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktopt.diagnostics import Diagnostic, UsageError

FAIL_ON = ("error", "warning", "info", "never")
LISTS = ("models", "select", "ignore")
KEYS = (*LISTS, "fail-on", "hardware")
UNREADABLE = ("KT101", "KT103", "KT104", "KT105", "KT106", "KT107", "KT108")
"""Findings that mean that nothing else in the file was checked: no choice of codes hides them."""
MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class Settings:
    """The values of [tool.ktopt]; None where it doesn't say, or there is none."""

    models: tuple[str, ...] | None = None
    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None
    fail_on: str | None = None
    hardware: str | None = None


@dataclass
class SettingsFinder:
    """Finds each file's settings, reading each pyproject.toml once."""

    known: dict[Path, Settings | None] = field(default_factory=dict)

    @property
    def paths(self) -> set[str]:
        """Every pyproject.toml that was looked for."""
        return {str(folder / "pyproject.toml") for folder in self.known}

    def of(self, rules: str) -> Settings:
        """The settings of a rule file, or of the working folder for "-". UsageError for a table that can't be used."""
        folder = Path.cwd() if rules == "-" else Path(rules).resolve().parent
        for above in (folder, *folder.parents):
            if above not in self.known:
                self.known[above] = None  # so that it counts as looked for, should reading it fail
                self.known[above] = _read(above / "pyproject.toml")
            found = self.known[above]
            if found is not None:
                return found
        return Settings()


def _read(path: Path) -> Settings | None:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES)
    except OSError:
        return None
    if b"ktopt" not in data or b"tool" not in data:
        return None
    import tomllib

    try:
        tools = tomllib.loads(data.decode("utf-8")).get("tool")
    except (ValueError, RecursionError) as error:
        if b"tool.ktopt" in data:
            raise UsageError(f"{path}: isn't valid TOML: {error}") from None
        return None
    table = tools.get("ktopt") if isinstance(tools, dict) else None
    return None if table is None else read_settings(table, path)


def read_settings(table: Any, path: Path) -> Settings:
    """The settings that a [tool.ktopt] table holds. UsageError for unknown keys and values that can't be meant."""
    if not isinstance(table, dict):
        raise UsageError(f"{path}: tool.ktopt is not a table; write [tool.ktopt]")
    for key in table:
        if key not in KEYS:
            from ktopt.operator import nearest

            near = nearest(key, KEYS)
            hint = f"did you mean {near}?" if near else f"its keys are {', '.join(KEYS)}"
            raise UsageError(f"{path}: [tool.ktopt] has no key {key}; {hint}")
    lists = {key: _texts(table, key, path) for key in LISTS}
    for key in ("select", "ignore"):
        check_prefixes(lists[key] or (), f"{path}: [tool.ktopt] {key}")
    fail_on = _text(table, "fail-on", path)
    if fail_on is not None and fail_on not in FAIL_ON:
        raise UsageError(f"{path}: [tool.ktopt] fail-on is {fail_on!r}; write one of {', '.join(FAIL_ON)}")
    models, hardware = lists["models"], _text(table, "hardware", path)
    return Settings(
        models=None if models is None else tuple(_beside(path, model) for model in models),
        select=lists["select"],
        ignore=lists["ignore"],
        fail_on=fail_on,
        hardware=None if hardware is None else _beside(path, hardware),
    )


def _texts(table: dict[str, Any], key: str, path: Path) -> tuple[str, ...] | None:
    value = table.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise UsageError(f'{path}: [tool.ktopt] {key} must be a list of strings, such as {key} = ["..."]')
    return tuple(value)


def _text(table: dict[str, Any], key: str, path: Path) -> str | None:
    value = table.get(key)
    if value is None or (isinstance(value, str) and value):
        return value
    raise UsageError(f'{path}: [tool.ktopt] {key} must be a string, such as {key} = "..."')


def _beside(path: Path, name: str) -> str:
    """A path relative to the settings' folder where there is such a file or folder; otherwise the name of something shipped."""
    there = path.parent / name
    return str(there) if there.exists() else name


def check_prefixes(prefixes: Iterable[str], said_by: str) -> None:
    """UsageError for a prefix that begins no code."""
    from ktopt.codes import CLASSES, CODES

    for prefix in prefixes:
        if not any(code.startswith(prefix.upper()) for code in CODES):
            classes = ", ".join(f"{code} ({name})" for code, name in CLASSES.items())
            raise UsageError(f"{said_by}: no code begins with {prefix!r}; classes are {classes}; `ktopt explain` lists the codes")


@dataclass(frozen=True)
class CodeFilter:
    """Which codes are reported: those that the longer prefix selects. Without `select` all are, but those to ignore."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def takes(self, code: str) -> bool:
        selected = _longest(self.select, code) if self.select else 0
        return code in UNREADABLE or selected > _longest(self.ignore, code)

    def apply(self, diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
        """Those that are reported. What stops the plan always is: without it a run would look as if there were a plan."""
        return [d for d in diagnostics if self.takes(d.code) or d.stops_plan]


ALL_CODES = CodeFilter()


def _longest(prefixes: Iterable[str], code: str) -> int:
    """The length of the longest prefix that begins the code, -1 where none does."""
    return max((len(prefix) for prefix in prefixes if code.startswith(prefix.upper())), default=-1)
