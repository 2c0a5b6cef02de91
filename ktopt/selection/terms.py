"""Parts of a match that select nothing though the whole selects something: a misspelt name beside right ones would go unseen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from ktopt.diagnostics import Report, Severity
from ktopt.graph import ModuleGraph
from ktopt.match import Matches
from ktopt.pattern import PatternError, PatternTimeout, compile_pattern
from ktopt.ruleset import NameClass, Rule
from ktopt.selection.nearest import near_words
from ktopt.selection.nothing import layers_beyond, near_names
from ktopt.selection.spots import part_of
from ktopt.selector import Selector
from ktopt.selector.expression import AllOf, AnyOf, Call, Equal, Expression, Glob, Minus, Not, Ref
from ktopt.selector.glob import numbers_written
from ktopt.source import Origin, Position, Span
from ktopt.treeindex import index_of

MOST_LOOKED_AT = 50
"""Parts of one match that are looked at: no written file has as many, and each costs a walk over the tree."""


@dataclass(frozen=True, slots=True)
class Term:
    """A glob, name, class or type that no module has: as a selector of its own, and where it stands."""

    selector: Selector
    origin: Origin
    let: str = ""

    @property
    def message(self) -> str:
        where = f" (in the `let` {self.let})" if self.let else ""
        return f"no module is in `{self.selector.text}`{where}"


def dead_terms(selector: Selector, graph: ModuleGraph) -> list[Term]:
    """The operands of a selector, and of the named selectors that it uses, that select nothing. Those that ask for layers beyond
    the model are not meant: KT306 tells of them."""
    found: dict[tuple[str, str], Term] = {}
    for owner, let, node in islice(_operands(selector, selector.root, "", set()), MOST_LOOKED_AT):
        text = str(node)
        if (let, text) not in found and _is_dead(node, owner, graph):
            alone = replace(owner, text=text, root=node)
            found[let, text] = Term(alone, _origin(owner, node), let)
    return list(found.values())


def only_dead_term(selector: Selector, graph: ModuleGraph) -> Term | None:
    """The one part that selects nothing, of a selector that selects nothing for it."""
    terms = dead_terms(selector, graph)
    return terms[0] if len(terms) == 1 else None


def _operands(owner: Selector, node: Expression, let: str, seen: set[str]) -> Iterator[tuple[Selector, str, Glob | Equal]]:
    """Each glob and each name, class or type, one value at a time, with the selector whose text it stands in."""
    match node:
        case AnyOf() | AllOf() | Minus():
            for part in node.parts:
                yield from _operands(owner, part, let, seen)
        case Not() | Call():
            yield from _operands(owner, node.part, let, seen)
        case Ref():
            named = owner.named.get(node.name)
            if named is not None and node.name not in seen:
                seen.add(node.name)
                yield from _operands(named, named.root, node.name, seen)
        case Glob():
            yield owner, let, node
        case Equal() if node.field in ("name", "class", "type"):
            for value in node.values:
                yield owner, let, replace(node, values=(value,), listed=False)
        case _:
            pass


def _is_dead(node: Glob | Equal, owner: Selector, graph: ModuleGraph) -> bool:
    if isinstance(node, Glob) and any(number >= graph.layer_count for number in numbers_written(node.text)):
        return False
    try:
        return not replace(owner, root=node).evaluate_places(index_of(graph), graph.config)
    except (PatternError, PatternTimeout):
        return False


def _origin(owner: Selector, node: Glob | Equal) -> Origin:
    """Where an operand stands in its selector's text; the whole selector where that isn't sure."""
    at, span = owner.origin, owner.origin.span
    word = str(node) if isinstance(node, Glob) else str(node.values[0])
    ends = r"(?![\w.*{\[?-])" if isinstance(node, Glob) else r"(?![\w.])"
    hit = re.search(re.escape(word) + ends, owner.text)
    if hit is None or "\n" in owner.text or span.start.line != span.end.line:
        return at
    line, column = span.start.line, span.start.column
    return Origin(at.file, Span(Position(line, column + hit.start()), Position(line, column + hit.end())))


def check_terms(matches: Matches, report: Report) -> None:
    """KT301, a warning, for each part that selects nothing of a rule or a place that selects something; an info where the file is
    for several architectures, one of which may have what another lacks."""
    severity = Severity.INFO if len(matches.ruleset.architectures) > 1 else Severity.WARNING
    for rule in matches.ruleset.rules:
        if matches.active[rule.index] is False or not matches.takes(rule.index):
            continue
        if isinstance(rule.match, NameClass):
            _check_alternatives(rule, rule.match, matches.graph, severity, report)
        else:
            _report_terms(rule.match, matches.graph, severity, report)
    if matches.placed is not None:
        for place, takes in zip(matches.ruleset.places, matches.placed.takes, strict=True):
            if takes:
                _report_terms(place.selector, matches.graph, severity, report)


def _report_terms(selector: Selector, graph: ModuleGraph, severity: Severity, report: Report) -> None:
    for term in dead_terms(selector, graph):
        report.report("KT301", severity, term.message, term.origin, help=near_names(term.selector, graph))


def _check_alternatives(rule: Rule, clauses: NameClass, graph: ModuleGraph, severity: Severity, report: Report) -> None:
    """The alternatives of a pattern that stand side by side in the whole of it."""
    whole = clauses.name or ""
    parts = alternatives(whole)
    for part in parts[:MOST_LOOKED_AT] if len(parts) > 1 else ():
        try:
            pattern = compile_pattern(part)
            if any(pattern.search(path) for m in graph for path in (m.path, *m.alias_paths)) or layers_beyond(part, graph):
                continue
        except (PatternError, PatternTimeout):
            continue
        message = f"rule {rule.number}: no path is matched by `{part}`, one of the alternatives of its pattern"
        start = whole.index(part)
        at = part_of(clauses.name_origin or rule.match_origin, whole, start, start + len(part))
        report.report("KT301", severity, message, at, help=near_words(part, graph))


def alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between the bars that stand in no group, class or escape."""
    parts, depth, start, at = [], 0, 0, 0
    in_class = False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            at += pattern.startswith(("]", "^]"), at + 1) * (2 if pattern.startswith("^]", at + 1) else 1)
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            parts.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*parts, pattern[start:]]
