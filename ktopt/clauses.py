"""What a rule's clauses take in a tree, whatever other rules do.

An editor asks for the same clauses again at every keystroke, as a run on many files does. So what they take is kept with the
tree's index, and a pattern that used up its time isn't tried again on that tree for a while.
"""

from __future__ import annotations

from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from ktopt.graph import ModuleGraph
from ktopt.pattern import PatternTimeout, compile_pattern
from ktopt.pattern.prefix import prefix_filter
from ktopt.ruleset import NameClass, Rule
from ktopt.treeindex import index_of, is_a, set_of, span_of

if TYPE_CHECKING:
    from ktopt.selector import Selector
    from ktopt.selector.surroundings import Surroundings

BIG_SUBTREE = 300
"""Descendants from which on a subtree is walked on its own."""

MOST_KEPT = 2000
"""Clauses, and selectors, whose modules are kept, a tree."""

REST_S = 30.0
"""Seconds for which a pattern that took too long on a tree isn't tried there again."""


def modules_taken(rule: Rule, graph: ModuleGraph, around: Surroundings) -> int:
    """The modules that a rule's clauses select by any of their paths. PatternError or PatternTimeout where its pattern fails."""
    if not isinstance(rule.match, NameClass):
        return index_of(graph).modules_at(places_taken(rule, rule.match, graph, around))
    refuse_given_up(rule, graph)
    try:
        return _by_name_and_class(rule.match, graph)
    except PatternTimeout as error:
        give_up(rule, graph, error)
        raise


def places_taken(rule: Rule, selector: Selector, graph: ModuleGraph, around: Surroundings) -> int:
    """The places that a rule's selector takes. Kept with the tree's index where they depend on the tree alone. PatternTimeout
    where a pattern in it takes too long."""
    index = index_of(graph)
    if selector.asks_around:
        return selector.evaluate_places(index, graph.config, around)
    kept = index.selected.get(id(selector.root))
    if kept is not None:
        return kept[1]
    try:
        places = selector.evaluate_places(index, graph.config, around)
    except PatternTimeout as error:
        give_up(rule, graph, error)
        raise
    if len(index.selected) >= MOST_KEPT:
        index.selected.clear()
    index.selected[id(selector.root)] = (selector.root, places)
    return places


def _by_name_and_class(clauses: NameClass, graph: ModuleGraph) -> int:
    known, key = index_of(graph).taken, (clauses.name, clauses.cls)
    if key not in known:
        if len(known) >= MOST_KEPT:
            known.clear()
        known[key] = _find_by_name_and_class(clauses.name, clauses.cls, graph)
    return known[key]


def _find_by_name_and_class(name: str | None, written: str | None, graph: ModuleGraph) -> int:
    of_class = graph.all if written is None else index_of(graph).by_class(lambda module: is_a(written, module))
    if name is None or not of_class:
        return of_class
    find, prefix = compile_pattern(name).finder, prefix_filter(name)
    wanted = of_class.to_bytes((len(graph) + 7) // 8, "little")
    found: list[int] = []
    modules, size = graph.modules, len(graph)
    i, spans = 0, 0
    while i < size:
        module = modules[i]
        if wanted[i >> 3] >> (i & 7) & 1 and find(module.path):
            found.append(i)
        i += 1
        if module.end - i > BIG_SUBTREE and module.path:
            inside = f"{module.path}."
            if prefix.certain(inside):
                spans |= span_of(i, module.end)
            elif prefix.possible(inside):
                continue
            i = module.end
    for index, alias in index_of(graph).aliases:
        if wanted[index >> 3] >> (index & 7) & 1 and find(alias):
            found.append(index)
    return set_of(found, size) | spans & of_class


def give_up(rule: Rule, graph: ModuleGraph, error: PatternTimeout) -> None:
    """Remember that the rule's pattern, or its selector, takes too long on this tree, unless it is others that used up the time."""
    if not error.own:
        return
    known = index_of(graph).gave_up
    if len(known) >= MOST_KEPT:
        known.clear()
    key, kept = _tried(rule)
    known[key] = (monotonic(), kept)


def refuse_given_up(rule: Rule, graph: ModuleGraph) -> None:
    """PatternTimeout where the rule's pattern, or its selector, was given up on this tree a short while ago."""
    key, _ = _tried(rule)
    when, _ = index_of(graph).gave_up.get(key, (-inf, None))
    if monotonic() - when < REST_S:
        raise PatternTimeout(rule.match.name or "" if isinstance(rule.match, NameClass) else rule.match.text)


def _tried(rule: Rule) -> tuple[Any, Any]:
    """What was tried: a pattern, or an expression by its id, and what must be kept so that the id stays its own."""
    return (rule.match.name, None) if isinstance(rule.match, NameClass) else (id(rule.match.root), rule.match.root)
