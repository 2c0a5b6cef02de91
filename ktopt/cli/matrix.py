"""`ktopt check --matrix`: how many modules each rule takes on each model, so that drift between models is seen at a glance."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from ktopt.checking import FileCheck
from ktopt.cli.findings import at_least, count
from ktopt.cli.table import Column, layout
from ktopt.cli.terminal import columns, style_of
from ktopt.compiler import Compilation
from ktopt.diagnostics import Severity
from ktopt.ruleset import NameClass, Rule

SHORTEST = 40


def print_matrix(checks: Sequence[FileCheck], format: str) -> None:
    """Print a table for each file, or one JSON list."""
    if format == "json":
        print(json.dumps([matrix(check) for check in checks], indent=2))
        return
    style = style_of(sys.stdout)
    for number, check in enumerate(checks):
        print("\n" * bool(number) + style.paint(check.file, "bold"))
        rows = _rows(matrix(check))
        if rows:
            titles = [Column("rule"), *(Column(name, right=True) for name in check.compilations)]
            print(layout(titles, rows, columns(sys.stdout), style, least=SHORTEST))
        found = at_least(check.diagnostics, Severity.WARNING)
        if found:
            print(f"{count(found)}; `ktopt check` without --matrix says what")


def matrix(check: FileCheck) -> dict[str, Any]:
    """{"file", "rules": [{"rule", "id", "line", "match", "models": {name: {"matches", "decides", "active"}}}]}: how many modules
    of a model a rule matches, how many of them it decides because no earlier rule does, and whether it acts on this machine. A
    model's entry is null where the file's errors stop it."""
    compilations = check.compilations
    ruleset = next((c.ruleset for c in compilations.values() if c.ruleset is not None), None)
    rules = ruleset.rules if ruleset is not None else ()
    return {
        "file": check.file,
        "rules": [
            {
                "rule": rule.number,
                "id": rule.id,
                "line": rule.origin.span.start.line,
                "match": _match(rule),
                "models": {name: _counts(compilation, rule.index) for name, compilation in compilations.items()},
            }
            for rule in rules
        ],
    }


def _match(rule: Rule) -> str:
    """What a rule matches, as it is written."""
    if isinstance(rule.match, NameClass):
        return " ".join(part for part in (rule.match.name, rule.match.cls and f"class {rule.match.cls}") if part)
    return rule.match.text


def _counts(compilation: Compilation, index: int) -> dict[str, Any] | None:
    matches = compilation.matches
    if matches is None:
        return None
    active = matches.active[index] is not False
    return {"matches": matches.takes(index).bit_count(), "decides": matches.won(index).bit_count(), "active": active}


def _rows(found: dict[str, Any]) -> list[list[str]]:
    return [[f"{rule['rule']} {rule['match']}", *(_cell(counts) for counts in rule["models"].values())] for rule in found["rules"]]


def _cell(counts: dict[str, Any] | None) -> str:
    """ "58", "3 of 61" where earlier rules take the others, "nothing", "off" (its `when` is false), or "?" where errors stop it."""
    if counts is None:
        return "?"
    if not counts["active"]:
        return "off"
    if not counts["matches"]:
        return "nothing"
    if counts["decides"] == counts["matches"]:
        return str(counts["decides"])
    return f"{counts['decides']} of {counts['matches']}"
