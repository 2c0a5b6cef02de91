"""Completion of module paths, segment by segment in a glob of a selector or in a regex, and of a selector's other words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ktopt.graph import ModuleGraph
from ktopt.lsp import meanings
from ktopt.pattern import Pattern, PatternError, PatternTimeout, compile_pattern
from ktopt.selector.fields import TEXT_FIELDS
from ktopt.selector.glob import Glob, GlobError
from ktopt.treeindex import index_of, members

MOST = 400
"""Completions that are given at once."""

_GLOB = re.compile(r"@((?:[\w.*]|\{[^{}]*\})*)$")
_OPEN_BRACE = re.compile(r"@(?:[\w.*]|\{[^{}]*\})*\{[^{}]*$")
_REF = re.compile(r"\$(\w*)$")
_VALUE = re.compile(r"(class|type|name|dtype|path)\s*(?:!?=\s*|\s+in\s+(?:[\w.]+\s*,\s*)*)([\w.]*)$")
_DOTTED = re.compile(r"\b(config|hw)\.([\w.]*)$")
_WORD = re.compile(r"(?:^|[\s(|&!-])([A-Za-z_]\w*)?$")
_LAST_WORD = re.compile(r"(?<![\\\w])\w+$")
"""The part of a segment that is typed; not an escape's letter, as in \\d."""


class Next(NamedTuple):
    """One way to go on: what is written, how much of what is typed it takes the place of, and what it is."""

    text: str
    taken: int
    kind: str
    detail: str = ""
    help: str = ""


Graphs = Mapping[str, ModuleGraph]


def in_selector(typed: str, graphs: Graphs, lets: Mapping[str, str], *, when: bool = False) -> list[Next]:
    """How a selector may go on after `typed`. `when`: it is a condition, which asks of the model and the machine only."""
    if _OPEN_BRACE.search(typed):
        return []
    if (found := _GLOB.search(typed)) and not when:
        return _in_glob(found[1], graphs)
    if found := _REF.search(typed):
        return [Next(f"${name}", len(found[0]), "ref", text) for name, text in lets.items()]
    if found := _DOTTED.search(typed):
        return _dotted(found[1], found[2], graphs)
    if found := _VALUE.search(typed):
        return _values(found[1], found[2], graphs)
    if (found := _WORD.search(typed)) is None:
        return []
    return _words(len(found[1] or ""), when, lets)


def _in_glob(typed: str, graphs: Graphs) -> list[Next]:
    """The segments that may come next in a glob. Numbers of layers and experts come as one *."""
    cut = _last_dot(typed)
    head, partial = typed[:cut], typed[cut:]
    counts: dict[str, int] = {}
    for graph in graphs.values():
        index = index_of(graph)
        try:
            places = Glob(f"{head}*").places(index)
        except (GlobError, PatternError, PatternTimeout):
            return []
        for place in members(places):
            segment = index.path(place).rpartition(".")[2]
            counts[segment] = counts.get(segment, 0) + 1
    numbers = [int(s) for s in counts if s.isdecimal()]
    found = []
    if numbers:
        found += [Next("*", len(partial), "segment", f"each of {len(numbers)}")]
        found += [Next(f"{{0..{max(numbers)}}}", len(partial), "segment", "a range of numbers")]
    found += [Next(s, len(partial), "segment", times(n)) for s, n in counts.items() if not s.isdecimal()]
    if counts:
        found.append(Next("**", len(partial), "segment", "all that is inside"))
    return found[:MOST]


def _last_dot(typed: str) -> int:
    """Where a glob's last segment begins. Dots in braces part nothing."""
    depth, cut = 0, 0
    for at, c in enumerate(typed):
        depth += (c == "{") - (c == "}")
        if c == "." and not depth:
            cut = at + 1
    return cut


def _dotted(head: str, typed: str, graphs: Graphs) -> list[Next]:
    if head == "hw":
        if typed.startswith("cpu."):
            return [Next(name, len(typed) - 4, "field", "feature of the CPU") for name in meanings.CPU_FEATURES]
        found = [Next(name, len(typed), "field", "", text) for name, text in meanings.HARDWARE.items()]
        return [*found, Next("cpu", len(typed), "field", "features of the CPU, such as hw.cpu.amx")]
    names: dict[str, str] = {}
    above, _, _ = typed.rpartition(".")
    for graph in graphs.values():
        config: Any = graph.config
        for part in above.split(".") if above else ():
            config = config.get(part) if isinstance(config, Mapping) else None
        for key, value in config.items() if isinstance(config, Mapping) else ():
            names.setdefault(str(key), str(value)[:60])
    taken = len(typed) - (len(above) + 1 if above else 0)
    return [Next(key, taken, "field", value) for key, value in names.items()][:MOST]


def _values(field: str, typed: str, graphs: Graphs) -> list[Next]:
    if field in ("class", "type"):
        named = {name.rpartition(".")[2]: count for name, count in reversed(class_counts(graphs).items())}
        return [Next(name, len(typed), "class", times(count)) for name, count in named.items()][:MOST]
    if field == "dtype":
        types = {t.dtype for graph in graphs.values() for m in graph for t in m.parameters}
        return [Next(name, len(typed), "value") for name in sorted(types)]
    counts: dict[str, int] = {}
    for graph in graphs.values():
        for module in graph:
            text = module.name if field == "name" else module.path
            if text and not text.isdecimal():
                counts[text] = counts.get(text, 0) + 1
    return [Next(text, len(typed), "segment", times(count)) for text, count in counts.items()][:MOST]


def _words(typed: int, when: bool, lets: Mapping[str, str]) -> list[Next]:
    if when:
        return [Next("hw.", typed, "field", "the machine"), Next("config.", typed, "field", "the model's config")]
    found = [Next("@", typed, "field", "a glob over paths, such as @model.layers.*.mlp")]
    found += [Next(f"${name}", typed, "ref", text) for name, text in lets.items()]
    for name, text in meanings.FIELDS.items():
        sign = "=" if name in TEXT_FIELDS else ""
        found.append(Next(f"{name}{sign}", typed, "field", "", text))
    found += [Next("config.", typed, "field", "the model's config"), Next("hw.", typed, "field", "the machine")]
    return found + [Next(f"{name}(", typed, "function", "", text) for name, text in meanings.FUNCTIONS.items()]


def class_counts(graphs: Graphs) -> dict[str, int]:
    """Every class that a rule may name, dotted, as rule files write it, and how many modules have it: a model's own classes first,
    KTransformers' names and bases after them."""
    own: dict[str, int] = {}
    other: dict[str, int] = {}
    for graph in graphs.values():
        for example, group in index_of(graph).classes:
            count = group.bit_count()
            name = _short(example.cls.name)
            own[name] = own.get(name, 0) + count
            for dotted in (*example.alias_classes, *example.cls.mro[1:]):
                other[_short(dotted)] = other.get(_short(dotted), 0) + count
    return own | {name: count for name, count in other.items() if name not in own}


def _short(dotted: str) -> str:
    """torch.nn.modules.linear.Linear as torch.nn.Linear."""
    return re.sub(r"^torch\.nn\.modules\.\w+\.", "torch.nn.", dotted)


def in_regex(typed: str, graphs: Graphs, quote: str) -> list[Next]:
    """How a regex over paths may go on. `typed` is as written: in double quotes each backslash stands twice."""
    partial = _LAST_WORD.search(typed)
    head, taken = (typed[: partial.start()], len(partial[0])) if partial else (typed, 0)
    backslash = "\\\\" if quote == '"' else "\\"
    counts = _after(head.replace("\\\\", "\\") if quote == '"' else head, graphs)
    numbers = [s for s in counts if s.isdecimal()]
    found = [Next(f"{backslash}d+", taken, "segment", "any number")] if numbers else []
    found += [Next(s, taken, "segment", times(n)) for s, n in counts.items() if not s.isdecimal()]
    found += [Next(s, taken, "segment", times(counts[s])) for s in sorted(numbers, key=int)]
    return found[:MOST]


def _after(head: str, graphs: Graphs) -> dict[str, int]:
    """The path segments that follow where a regex matches, and how many modules have each there; all segments, where it is no regex
    as yet, as within brackets."""
    try:
        pattern: Pattern | None = compile_pattern(head)
    except PatternError:
        pattern = None
    counts: dict[str, int] = {}
    try:
        for path in _paths(graphs):
            for segment in _segments(path, head, pattern):
                counts[segment] = counts.get(segment, 0) + 1
    except PatternTimeout:
        return counts
    return counts


def _segments(path: str, head: str, pattern: Pattern | None) -> Iterable[str]:
    if pattern is None or not head:
        return path.split(".")
    found: Any = pattern.finder(path)
    if not found:
        return ()
    rest = path[found.end() :]
    return (rest.partition(".")[0],) if rest and not rest.startswith(".") else ()


def _paths(graphs: Graphs) -> Iterable[str]:
    return dict.fromkeys(path for graph in graphs.values() for m in graph if m.path for path in (m.path, *m.alias_paths))


def times(count: int) -> str:
    return f"{count:,} modules" if count != 1 else "1 module"
