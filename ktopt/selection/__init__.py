"""Whether a rule file selects what it seems to: rules that match nothing or never come to act, and layers that are left out."""

from __future__ import annotations

from ktopt.diagnostics import Report
from ktopt.match import Matches, report_pattern
from ktopt.selection.architectures import check_architectures
from ktopt.selection.branches import branches_of, check_branches
from ktopt.selection.layers import check_layers
from ktopt.selection.places import check_place, check_place_gaps
from ktopt.selection.rules import check_rule, owners, where
from ktopt.selection.structure import check_structure
from ktopt.selection.terms import check_terms
from ktopt.selection.unmentioned import check_experts_mentioned
from ktopt.selection.unsettled import check_unsettled

__all__ = ["check_selection", "owners", "where"]


def check_selection(matches: Matches, report: Report) -> None:
    """Add what KT3, KT407, KT5 and KT6 have to say of a rule file on a model. Where it depends on what isn't known, every case is
    looked at that makes a difference (branches.py)."""
    check_architectures(matches, report)
    check_unsettled(matches, report)
    check_terms(matches, report)
    _report_slow(matches, report)
    branches = branches_of(matches)
    if branches:
        check_branches(matches, branches, report)
        return
    for rule in matches.ruleset.rules:
        check_rule(rule, matches, report)
    for place in matches.ruleset.places:
        check_place(place, matches, report)
    check_place_gaps(matches, report)
    check_layers(matches, report)
    check_structure(matches, report)
    if matches.ruleset.auto is None:
        check_experts_mentioned(matches, report)


def _report_slow(matches: Matches, report: Report) -> None:
    """KT304 for each rule whose pattern takes too long over the whole tree, though it may not have over what was left to it."""
    for rule in matches.ruleset.rules:
        if matches.active[rule.index] is not False and not matches.takes(rule.index) and rule.index in matches.slow:
            report_pattern(rule, matches.slow[rule.index], report)
