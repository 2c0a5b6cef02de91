"""Every finding's code and its page: what `ktopt explain KT302` prints and docs/codes.md is made of.

The pages stand in codes.md beside this file; `CODES` reads them at first use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

CLASSES = {
    "KT1": "YAML",
    "KT2": "shape",
    "KT3": "selection",
    "KT4": "operator",
    "KT5": "placement",
    "KT6": "structure",
    "KT7": "weights",
}
"""The first digit's meaning."""

_HEADING = re.compile(r"# (KT\d{3}) (.+) \((error|warning|info)\)")
CODES: Mapping[str, Code]


@dataclass(frozen=True, slots=True)
class Code:
    """A code's page. `severity` is the one that it usually has; `example` and `instead` are what is written and what to write."""

    code: str
    title: str
    severity: str
    what: str
    why: str
    example: str
    instead: str


def page(code: str) -> str:
    """The page of a code as text. KeyError where there is no such code."""
    c = _codes()[code.upper()]
    parts = (f"{c.code}: {c.title} ({c.severity})", c.what, f"Why it is bad: {c.why}")
    example = ("Example:", indent(c.example, "    "), "Write instead:", indent(c.instead, "    "))
    return "\n\n".join((*parts, *example)) + "\n"


def render_codes() -> str:
    """docs/codes.md: every page, by class."""
    out = [
        "# Findings\n",
        "What `ktopt check` reports; `ktopt explain CODE` prints one page. Made by `python scripts/generate.py`.\n",
    ]
    for prefix, name in CLASSES.items():
        out.append(f"## {prefix}: {name}\n")
        for c in (c for code, c in _codes().items() if code.startswith(prefix)):
            out += [f"### {c.code}: {c.title}\n", f"Usually: {c.severity}. {c.what}\n", f"Why it is bad: {c.why}\n"]
            out += [f"```yaml\n{c.example}\n```\n", "Write instead:\n", f"```yaml\n{c.instead}\n```\n"]
    return "\n".join(out)


def __getattr__(name: str) -> Any:
    if name == "CODES":
        return _codes()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _codes() -> Mapping[str, Code]:
    text = Path(__file__).with_name("codes.md").read_text(encoding="utf-8")
    found = [_parse(part) for part in re.split(r"^(?=# KT)", text, flags=re.MULTILINE) if part.strip()]
    return {code.code: code for code in found}


def _parse(text: str) -> Code:
    heading, _, body = text.partition("\n")
    found = _HEADING.fullmatch(heading)
    parts = re.split(r"^(?:Why|Example|Instead):", body, flags=re.MULTILINE)
    if found is None or len(parts) != 4:
        raise ValueError(f"codes.md: {heading} is not a page")
    what, why, example, instead = parts
    return Code(
        found[1],
        found[2],
        found[3],
        " ".join(what.split()),
        " ".join(why.split()),
        dedent(example.strip("\n")).strip(),
        dedent(instead.strip("\n")).strip(),
    )
