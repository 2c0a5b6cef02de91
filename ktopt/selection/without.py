"""What rules would take elsewhere: on another machine, with other weights, or were it not for rules that hold by chance.

A rule with a `when:`, or whose selector asks about the machine or the weights, says something of some cases only. That it takes
another rule's modules here is no mistake of that rule.
"""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

from ktopt.diagnostics import Report
from ktopt.graph import ModuleGraph
from ktopt.match import Matches, match_in
from ktopt.pattern import PatternError, PatternTimeout
from ktopt.ruleset import NameClass, Rule
from ktopt.selector import Selector
from ktopt.selector.surroundings import NOTHING, branches
from ktopt.treeindex import index_of

MOST_TRIED = 8
"""Sets of rules that matching is done again without."""

_tried: WeakKeyDictionary[Matches, dict[frozenset[int], Matches]] = WeakKeyDictionary()


def is_conditional(rule: Rule) -> bool:
    """Whether what a rule takes depends on more than the tree."""
    return rule.when is not None or (not isinstance(rule.match, NameClass) and rule.match.asks_around)


def takes_somewhere(selector: Selector, graph: ModuleGraph) -> bool:
    """Whether a selector that asks about the machine or the weights takes something in some case."""
    index = index_of(graph)
    try:
        return any(selector.evaluate_places(index, graph.config, case) for case in branches([selector.root], NOTHING))
    except (PatternError, PatternTimeout):
        return True


def won_without(rule: Rule, matches: Matches, varied: Collection[int] = ()) -> int:
    """The modules that a rule would decide without the others that are conditional, but for those `varied` and those with its own
    condition."""
    off = frozenset(
        other.index for other in matches.ruleset.rules if _may_be_off(other, rule, matches) and other.index not in varied
    )
    if not off:
        return matches.won(rule.index)
    tried = _tried.setdefault(matches, {})
    if off not in tried:
        if len(tried) >= MOST_TRIED:
            return matches.takes(rule.index)
        tried[off] = match_in(matches.ruleset, matches.graph, matches.around, Report(), off=off)
    return tried[off].won(rule.index)


def _may_be_off(other: Rule, rule: Rule, matches: Matches) -> bool:
    if other is rule or matches.active[other.index] is False or not is_conditional(other):
        return False
    return other.when is None or rule.when is None or other.when.root != rule.when.root or other.when.text != rule.when.text
