"""Selectors: the expressions by which native rule files choose modules, from text to a set of modules.

The grammar is selector.lark; lark is imported at the first selector that is parsed. expression.py is the tree, evaluate.py what it
means, selector_errors.py how a mistake is told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from ktopt.diagnostics import Report
from ktopt.graph import ModuleGraph
from ktopt.placement import Hardware
from ktopt.selector.errors import SelectorError, explain
from ktopt.selector.evaluate import Evaluation, truth
from ktopt.selector.expression import Call, Equal, Expression, Glob, Matches, Order, Range, Ref, Unequal, walk
from ktopt.selector.fields import Test, about_machine, about_model, about_storage
from ktopt.selector.glob import numbers_written, words_written
from ktopt.selector.surroundings import NOTHING, Storage, Surroundings
from ktopt.source import Origin, Position, Span
from ktopt.treeindex import TreeIndex, index_of

MAX_CHARS = 10_000
MAX_DEPTH = 60
MAX_KEPT = 4000
_REF = re.compile(r"\$(\w+)")
_parsed: dict[tuple[str, tuple[int, ...]], tuple[tuple[Expression, int], tuple[Expression, ...]]] = {}
"""Selectors that were parsed, by their text and the named selectors in it, which are kept too so that their ids stay theirs."""


@dataclass(frozen=True)
class Selector:
    """A parsed selector. `text` is as written; `str()` gives it in one canonical spelling, which parses to the same selector.
    `named` are the selectors that its $names stand for."""

    text: str
    root: Expression
    origin: Origin
    depth: int = 1
    named: Mapping[str, Selector] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.root)

    def evaluate(self, graph: ModuleGraph, hardware: Hardware | None = None, storage: Storage | None = None) -> int:
        """The modules that it takes by any of their paths, as a set of bits over graph.modules.

        Without `storage`, tests of `quant` hold nowhere; nor do those of `hw` where the hardware is unknown. PatternTimeout where a
        pattern uses up its budget.
        """
        index = index_of(graph)
        return index.modules_at(self.evaluate_places(index, graph.config, Surroundings(hardware, storage)))

    def evaluate_places(self, index: TreeIndex, config: Mapping[str, Any], around: Surroundings = NOTHING) -> int:
        """As `evaluate`, for modules and their aliases apart: a set of bits over the index's places."""
        return Evaluation(index, config, around).places(self.root)

    def evaluate_when(self, config: Mapping[str, Any], around: Surroundings = NOTHING) -> bool | None:
        """The truth of a `when:`; None where it depends on a machine that isn't known. It must not ask about modules."""
        return truth(self.root, config, around)

    @property
    def asks_hardware(self) -> bool:
        """Whether it depends on the machine."""
        return any(about_machine(field) for field in self._fields)

    @property
    def asks_storage(self) -> bool:
        """Whether it depends on how weights are stored."""
        return any(about_storage(field) for field in self._fields)

    @property
    def asks_around(self) -> bool:
        """Whether it depends on more than the tree and its config."""
        return self.asks_hardware or self.asks_storage

    def lacks(self, around: Surroundings) -> list[str]:
        """The fields that it asks for and that are neither known nor supposed."""
        return [field for field in dict.fromkeys(self._fields) if around.lacks(field)]

    @property
    def asks_modules(self) -> bool:
        """Whether it chooses among modules, rather than all or none."""
        return any(not about_model(f) for f in self._fields) or any(isinstance(n, Glob | Call) for n in walk(self.root))

    @property
    def tests(self) -> list[Test]:
        """Its tests of fields, those of named selectors included."""
        return [n for n in walk(self.root) if isinstance(n, Equal | Unequal | Matches | Order)]

    @cached_property
    def _fields(self) -> list[str]:
        return [test.field for test in self.tests]

    @property
    def names_used(self) -> frozenset[str]:
        """The named selectors that it refers to itself."""
        return frozenset(node.name for node in walk(self.root, into_named=False) if isinstance(node, Ref))

    @property
    def layers_written(self) -> tuple[int, ...]:
        """Layer numbers that it spells out, ranges by their last."""
        found: list[int] = []
        for node in walk(self.root):
            if isinstance(node, Glob):
                found += numbers_written(node.text)
            elif isinstance(node, Equal) and node.field == "layer":
                for value in node.values:
                    number = value.last if isinstance(value, Range) else int(value) if value.isdigit() else None
                    found += [] if number is None else [number]
        return tuple(found)

    @property
    def classes_written(self) -> tuple[str, ...]:
        """Classes that it names."""
        return tuple(str(v) for n in walk(self.root) if isinstance(n, Equal) and n.field in ("class", "type") for v in n.values)

    @property
    def segments_written(self) -> tuple[str, ...]:
        """Path segments that it names."""
        found: list[str] = []
        for node in walk(self.root):
            if isinstance(node, Glob):
                found += words_written(node.text)
            elif isinstance(node, Equal) and node.field == "name":
                found += [str(value) for value in node.values]
        return tuple(found)


def parse_selector(
    text: str, origin: Origin, lets: Mapping[str, Selector], report: Report, *, when: bool = False
) -> Selector | None:
    """The selector `text`, or None with an error (KT310) in `report` at the column where it goes wrong.

    origin  where the text stands; its first character is at the span's start
    lets    the selectors that $name may stand for
    when    it is a condition, which may ask of config and hw only
    """
    try:
        if len(text) > MAX_CHARS:
            raise SelectorError(f"it has {len(text)} characters; at most {MAX_CHARS} are read", MAX_CHARS)
        root, depth = _parse(text, lets)
        named = {name: lets[name] for name in _REF.findall(text) if name in lets}
        selector = Selector(text, root, origin, depth, named)
        if when and selector.asks_modules:
            raise SelectorError("a condition can ask of config.KEY and hw.KEY only, not of modules", 0, len(text))
    except SelectorError as error:
        help = error.help or None
        report.error("KT310", f"selector, column {error.offset + 1}: {error.message}", _at(text, origin, error), help=help)
        return None
    return selector


def _at(text: str, origin: Origin, error: SelectorError) -> Origin:
    """The mistake's place in the file; the whole selector's where it takes several lines."""
    start, end = origin.span.start, origin.span.end
    if "\n" in text or start.line != end.line:
        return origin
    at = Position(start.line, start.column + min(error.offset, len(text)))
    return Origin(origin.file, Span(at, Position(at.line, at.column + max(1, error.width))))


def _parse(text: str, lets: Mapping[str, Selector]) -> tuple[Expression, int]:
    """A selector's expression and its depth; the same one for the same text, where its named selectors are the same ones. Known by
    identity: one that names another twice, and so on, is too large to compare."""
    named = [lets.get(name) for name in sorted(set(_REF.findall(text)))]
    roots = tuple(selector.root for selector in named if selector is not None)
    if len(roots) < len(named):
        return _read(text, lets)  # which raises, and names all that there are
    key = (text, tuple(map(id, roots)))
    found = _parsed.get(key)
    if found is None:
        if len(_parsed) >= MAX_KEPT:
            _parsed.clear()
        found = _parsed[key] = (_read(text, lets), roots)
    return found[0]


def _read(text: str, lets: Mapping[str, Selector]) -> tuple[Expression, int]:
    from lark.exceptions import UnexpectedInput, VisitError

    from ktopt.selector.build import Build

    try:
        tree = _parser().parse(text)
        root, depth = Build({name: (s.root, s.depth) for name, s in lets.items()}, MAX_DEPTH).transform(tree)
        return root, depth
    except UnexpectedInput as error:
        raise explain(text, error) from None
    except VisitError as error:
        if isinstance(error.orig_exc, SelectorError):
            raise error.orig_exc from None
        raise


@cache
def _parser() -> Any:
    from lark import Lark

    grammar = (files("ktopt.selector") / "selector.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", lexer="contextual", maybe_placeholders=False)
