"""Globs that select nothing by a common slip: a path that doesn't begin at the model's root, a `*` that was to cross dots."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ktopt.diagnostics import Report
from ktopt.graph import ModuleGraph
from ktopt.selector import Selector, parse_selector

_GLOB = re.compile(r"@[\w.*{},]+")


def glob_slip(selector: Selector, graph: ModuleGraph) -> str | None:
    """What to write instead of a glob in a selector that selects nothing, where the selector then selects something."""
    text = selector.text
    for glob in _GLOB.finditer(text):
        for meant, why in _variants(glob[0]):
            changed = parse_selector(text[: glob.start()] + meant + text[glob.end() :], selector.origin, {}, Report())
            if changed is not None and changed.evaluate(graph):
                return f"{why}: write {meant}"
    return None


def _variants(glob: str) -> Iterator[tuple[str, str]]:
    rooted = glob if glob.startswith(("@model.", "@**")) else f"@model.{glob[1:]}"
    if rooted != glob:
        yield rooted, "a path begins at the model's root"
    if glob.endswith(".*"):
        yield f"{glob}*", "`*` does not cross a dot"
        if rooted != glob:
            yield f"{rooted}*", "a path begins at the model's root, and `*` does not cross a dot"
