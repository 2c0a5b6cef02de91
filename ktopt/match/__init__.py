"""The match stage: which rule decides each module.

The tree is walked from the root, a parent before what is below it (walk.py). Each of a module's paths is won by the first rule, in
the file's order, that takes it; a winner with `recursive: false` closes the module's subtree to every rule. Where a module has
alias paths, the rules that won those decide, unless its own path was won by an earlier rule.
"""

from __future__ import annotations

from collections.abc import Collection

from ktopt.diagnostics import Report
from ktopt.graph import ModuleGraph
from ktopt.match.matches import Decision, Matches
from ktopt.match.places import place_modules
from ktopt.match.walk import Walk, contenders, report_pattern
from ktopt.placement import Hardware
from ktopt.ruleset import Rule, RuleSet
from ktopt.selector.surroundings import Storage, Surroundings

__all__ = ["Decision", "Matches", "match", "match_in", "report_pattern"]


def match(
    ruleset: RuleSet, graph: ModuleGraph, hardware: Hardware | None, report: Report, *, storage: Storage | None = None
) -> Matches:
    """Decide every module. A pattern that can't be compiled, or takes too long, is reported (KT304) and its rule takes nothing.

    Rules whose `when:` asks about a machine that isn't known are taken to hold; tests of it in selectors, and of unknown storage
    types, are taken not to.
    """
    return match_in(ruleset, graph, Surroundings(hardware, storage), report)


def match_in(ruleset: RuleSet, graph: ModuleGraph, around: Surroundings, report: Report, *, off: Collection[int] = ()) -> Matches:
    """As `match`, in given surroundings, which may be supposed, and without the rules `off`."""
    active = tuple(rule.index not in off and _is_active(rule, graph, around, report) for rule in ruleset.rules)
    ready = contenders(ruleset, active, graph, around, report)
    places = place_modules(ruleset, graph, around, report)
    walk = Walk(ruleset.rules, graph, ready, places, report)
    decisions = walk.run()
    failed = {rule.index for rule in ruleset.rules if active[rule.index] is not False} - {c.rule for c in ready} | walk.failed
    return Matches(ruleset, graph, decisions, active, around, failed, placed=places)


def _is_active(rule: Rule, graph: ModuleGraph, around: Surroundings, report: Report) -> bool | None:
    if rule.when is None:
        return True
    if rule.when.asks_modules:
        message = f"rule {rule.number}: `when` can ask of config.KEY and hw.KEY only, not of modules"
        report.error("KT310", message, rule.when.origin, help="put what chooses modules into `match`")
        return False
    return rule.when.evaluate_when(graph.config, around)
