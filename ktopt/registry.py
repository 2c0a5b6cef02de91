"""Finding operators by name, and their implementations by import: the only place that imports either.

Built-in names come from a generated catalogue (schemas/catalogue.json: name -> declaring module), so a lookup imports one file.
Entry points of the group "ktopt.operators" are scanned only for a name that the catalogue lacks.
"""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from ktopt.diagnostics import KtoptError
from ktopt.operator import REGISTERED, OperatorSpec, nearest


@cache
def catalogue() -> dict[str, str]:
    """Every built-in operator name and alias, to the module that declares it."""
    folder = importlib.import_module("ktopt.schemas").__path__[0]
    text = Path(folder, "catalogue.json").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text)
    return found


def find(name: str) -> OperatorSpec | None:
    """The operator of that name or alias, or None."""
    if name not in REGISTERED:
        module = catalogue().get(name)
        if module is None:
            _load_entry_points()
        else:
            importlib.import_module(module)
    return REGISTERED.get(name)


def suggest(name: str) -> str:
    """The known operator name nearest to an unknown one ("" when none is near).

    A dotted name is compared by its last part, first with the operators of the same package; the nearest is then given as dotted.
    """
    known = names()
    package, _, last = name.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if package and other.rpartition(".")[0] == package}
    near = nearest(last, siblings)
    return siblings[near] if near else nearest(last, [other for other in known if "." not in other])


def names() -> list[str]:
    """Every operator name and alias, third parties' included if loaded."""
    return sorted({*catalogue(), *REGISTERED})


def specs() -> list[OperatorSpec]:
    """Every operator, by name; imports all declarations."""
    for module in sorted(set(catalogue().values())):
        importlib.import_module(module)
    _load_entry_points()
    unique = {spec.name: spec for spec in REGISTERED.values()}
    return [unique[name] for name in sorted(unique)]


@cache
def _load_entry_points() -> None:
    from importlib.metadata import entry_points

    for entry in entry_points(group="ktopt.operators"):
        if entry.value.partition(":")[0].startswith("ktopt."):
            continue  # our own: the catalogue has them
        try:
            entry.load()
        except Exception as error:
            raise KtoptError(f"the operator plug-in {entry.name} ({entry.value}) can't be imported: {error}") from error


def implementation(spec: OperatorSpec) -> Any:
    """The class that an operator's `implementation` string names. Imports torch; called by `apply` alone."""
    module, _, name = spec.implementation.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise KtoptError(f"operator {spec.name}: its implementation {spec.implementation} can't be imported: {error}") from error
