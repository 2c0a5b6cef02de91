"""Formats for programs: a JSON list of records (Diagnostic.to_json), or one record a line."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ktopt.diagnostics import Diagnostic


def json_list(diagnostics: Sequence[Diagnostic]) -> str:
    return json.dumps([d.to_json() for d in diagnostics], indent=2) + "\n"


def json_lines(diagnostics: Sequence[Diagnostic]) -> str:
    return "".join(json.dumps(d.to_json()) + "\n" for d in diagnostics)
