"""Rules that ask about a machine or about weights that aren't known: every case that makes a difference is looked at.

That a rule takes nothing, or another number than it expects, is a mistake only where it does so in every case in which it applies.
What can't work together is a mistake in any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ktopt.diagnostics import Diagnostic, Report, Severity
from ktopt.match import Matches, match_in
from ktopt.ruleset import NameClass
from ktopt.selection.layers import check_layers
from ktopt.selection.places import check_place
from ktopt.selection.rules import already_said, check_rule, where
from ktopt.selection.structure import check_structure
from ktopt.selection.unmentioned import check_experts_mentioned
from ktopt.selector.expression import Expression
from ktopt.selector.fields import Test
from ktopt.selector.surroundings import Surroundings, branches, describe, tests_of
from ktopt.source import Origin


@dataclass(frozen=True)
class Branch:
    """What the rules take in one case, and what is to be said of their layers and of their structure there."""

    around: Surroundings
    matches: Matches
    layers: tuple[Diagnostic, ...]
    structure: tuple[Diagnostic, ...]


def branches_of(matches: Matches) -> list[Surroundings]:
    """The cases that make a difference to a file's rules and places. Empty where all that they ask for is known."""
    return branches(_asking(matches), matches.around)


def _asking(matches: Matches) -> Iterator[Expression]:
    """What asks for something that isn't known."""
    for rule in matches.ruleset.rules:
        if rule.when is not None and matches.active[rule.index] is None:
            yield rule.when.root
        active = matches.active[rule.index] is not False
        if active and not isinstance(rule.match, NameClass) and rule.match.lacks(matches.around):
            yield rule.match.root
    for place in matches.ruleset.places:
        if place.selector.lacks(matches.around):
            yield place.selector.root


def check_branches(matches: Matches, cases: Iterable[Surroundings], report: Report) -> None:
    """The findings of all cases together."""
    looked = [_look(matches, case, report) for case in cases]
    varied = {*matches.needs_hardware, *matches.needs_weights}
    for rule in matches.ruleset.rules:
        found = []
        for branch in looked:
            if branch.matches.active[rule.index]:
                check_rule(rule, branch.matches, one := Report(), varied)
                found.append(one.items)
        _add_agreed(found, report)
    for place in matches.ruleset.places:
        found = []
        for branch in looked:
            check_place(place, branch.matches, one := Report())
            found.append(one.items)
        _add_agreed(found, report)
    _add_layers(looked, report)
    _add_structure(list(tests_of(_asking(matches))), [b for b in looked if not b.around.storage_supposed], report)


def _look(matches: Matches, around: Surroundings, report: Report) -> Branch:
    there = match_in(matches.ruleset, matches.graph, around, report)
    check_layers(there, layers := Report())
    check_structure(there, structure := Report())
    check_experts_mentioned(there, structure)
    return Branch(around, there, tuple(layers), tuple(structure))


def _add_agreed(found: Sequence[Sequence[Diagnostic]], report: Report) -> None:
    """Of one rule's findings, those of all cases in which it applies, each as grave as in any."""
    for d in found[0] if found else ():
        same = [next((e for e in items if _alike(d, e)), None) for items in found]
        agreed = [e for e in same if e is not None]
        if len(agreed) == len(same) and not already_said(d.code, Origin(d.file, d.span), report):
            gravest = next(s for s in Severity if any(e.severity is s for e in agreed))
            report.add(next(e for e in agreed if e.severity is gravest))


def _alike(a: Diagnostic, b: Diagnostic) -> bool:
    return (a.code, a.file, a.span) == (b.code, b.file, b.span)


def _add_layers(looked: Sequence[Branch], report: Report) -> None:
    """Layers that are left out (KT309) are reported where they are in every case in which the rule has its part; what is wrong with
    a number, where it is in any. The last case goes first: most conditions hold in it, and the fewest layers are left out."""
    said: list[Diagnostic] = []
    for d in (d for branch in reversed(looked) for d in branch.layers):
        known = any(_alike(d, e) or d.message == e.message for e in said)
        if not known and (d.code != "KT309" or all(_agrees(d, branch) for branch in looked)):
            said.append(d)
            report.add(d)


def _agrees(d: Diagnostic, branch: Branch) -> bool:
    """Whether a case has the finding, or the rule that it stands at decides nothing in it."""
    if any(_alike(d, e) for e in branch.layers):
        return True
    at = Origin(d.file, d.span)
    named = (r for r in branch.matches.ruleset.rules if at in (where(r), r.match_origin))
    return not any(branch.matches.won(rule.index) for rule in named)


def _add_structure(tests: Sequence[Test], looked: Sequence[Branch], report: Report) -> None:
    """What can't work together in some case, with the case where it isn't so in all."""
    said: list[Diagnostic] = []
    for branch in looked:
        new = [d for d in branch.structure if not any(_alike(d, e) for e in said)]
        said += new
        for d in new:
            always = all(any(_alike(d, e) for e in other.structure) for other in looked)
            case = "" if always else describe(tests, branch.around)
            report.add(replace(d, message=f"{d.message} (where {case})") if case else d)
