"""Findings as SARIF 2.1.0, which code-scanning services read: rules with their pages, regions, related places and fixes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ktopt.codes import CLASSES, CODES, Code
from ktopt.diagnostics import Diagnostic, Edit, Fix, Severity
from ktopt.source import Origin, SourceFile, Span

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def sarif(diagnostics: Sequence[Diagnostic], sources: Mapping[str, SourceFile]) -> str:
    from ktopt import __version__

    driver = {"name": "ktopt", "version": __version__, "semanticVersion": __version__, "rules": [_rule(c) for c in CODES.values()]}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True}],
        "results": [_result(d, sources) for d in diagnostics],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(code: Code) -> dict[str, Any]:
    text = f"{code.what}\n\nWhy it is bad: {code.why}\n\nExample:\n{code.example}\n\nWrite instead:\n{code.instead}"
    blocks = f"```yaml\n{code.example}\n```\n\nWrite instead:\n\n```yaml\n{code.instead}\n```"
    return {
        "id": code.code,
        "shortDescription": {"text": code.title},
        "fullDescription": {"text": code.what},
        "help": {"text": text, "markdown": f"{code.what}\n\n**Why it is bad:** {code.why}\n\n{blocks}"},
        "defaultConfiguration": {"level": _LEVEL[Severity(code.severity)]},
        "properties": {"tags": [CLASSES[code.code[:3]]]},
    }


def _result(d: Diagnostic, sources: Mapping[str, SourceFile]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": d.code,
        "level": _LEVEL[d.severity],
        "message": {"text": f"{d.message}\n{d.help}" if d.help else d.message},
        "locations": [{"physicalLocation": _place(d.file, d.span, sources)}],
    }
    if d.code in CODES:
        result["ruleIndex"] = list(CODES).index(d.code)
    if d.related:
        result["relatedLocations"] = [_related(i, r.message, r.origin, sources) for i, r in enumerate(d.related, 1)]
    if d.fix:
        result["fixes"] = [_fix(d.fix)]
    if d.models:
        result["properties"] = {"models": list(d.models)}
    return result


def _related(number: int, message: str, origin: Origin, sources: Mapping[str, SourceFile]) -> dict[str, Any]:
    return {"id": number, "message": {"text": message}, "physicalLocation": _place(origin.file, origin.span, sources)}


def _place(file: str, span: Span, sources: Mapping[str, SourceFile]) -> dict[str, Any]:
    region: dict[str, Any] = _region(span)
    lines = sources[file].lines if file in sources else []
    if 0 < span.start.line <= len(lines) and len(lines[span.start.line - 1]) < 1000:
        region["snippet"] = {"text": lines[span.start.line - 1]}
    return {"artifactLocation": {"uri": _uri(file)}, "region": region}


def _region(span: Span) -> dict[str, int]:
    start, end = span.start, span.end
    return {"startLine": start.line, "startColumn": start.column, "endLine": end.line, "endColumn": end.column}


def _fix(fix: Fix) -> dict[str, Any]:
    by_file: dict[str, list[Edit]] = {}
    for edit in fix.edits:
        by_file.setdefault(edit.file, []).append(edit)
    changes = [
        {
            "artifactLocation": {"uri": _uri(file)},
            "replacements": [{"deletedRegion": _region(e.span), "insertedContent": {"text": e.text}} for e in edits],
        }
        for file, edits in by_file.items()
    ]
    return {"description": {"text": fix.title}, "artifactChanges": changes}


def _uri(file: str) -> str:
    """A relative path as a relative reference, an absolute one as a file: URI; standard input is named so."""
    from pathlib import PurePath
    from urllib.parse import quote

    path = PurePath("stdin" if file == "-" else file)
    return path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))
