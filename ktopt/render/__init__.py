"""Findings as text: each format is a pure function of a list of diagnostics.

`render(diagnostics, format)` returns what `ktopt check --format` prints. Nothing here reads a file or asks what the terminal is:
source lines come in through `sources`, colour through `style`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ktopt.diagnostics import Diagnostic
from ktopt.render.checked import Checked
from ktopt.render.style import PLAIN, Style
from ktopt.source import SourceFile

FORMATS = ("full", "concise", "json", "jsonl", "github", "sarif", "junit")
FOR_PEOPLE = ("full", "concise", "github")
"""Formats that may leave infos out, and have a line at their end that counts what was found."""


def render(
    diagnostics: Sequence[Diagnostic],
    format: str,
    *,
    sources: Mapping[str, SourceFile] | None = None,
    style: Style = PLAIN,
    checked: Sequence[Checked] = (),
) -> str:
    """The text of `diagnostics` in one of FORMATS, with a newline at its end unless it is empty. KeyError for another format.
    `checked` is what junit lists; without it, the files that have findings.
    """
    if format == "full":
        from ktopt.render.full import full

        return full(diagnostics, sources or {}, style)
    if format == "concise":
        from ktopt.render.concise import concise

        return concise(diagnostics, style)
    if format == "github":
        from ktopt.render.github import github

        return github(diagnostics)
    if format == "sarif":
        from ktopt.render.sarif import sarif

        return sarif(diagnostics, sources or {})
    if format == "junit":
        from ktopt.render.junit import junit

        return junit(diagnostics, checked)
    from ktopt.render.data import json_lines, json_list

    return {"json": json_list, "jsonl": json_lines}[format](diagnostics)
