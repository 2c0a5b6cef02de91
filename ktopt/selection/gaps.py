"""Layers that no rule covers while rules cover the same modules of others (KT309)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ktopt.diagnostics import Related, Report, Severity
from ktopt.match import Matches
from ktopt.pattern import PatternError, PatternTimeout, compile_pattern
from ktopt.pattern.check import pattern_fix
from ktopt.pattern.numbers import in_words, number_regex, runs
from ktopt.ruleset import NameClass, Rule
from ktopt.selection.families import Family, families, inner_name, layers_in_words
from ktopt.selection.spots import NUMBER, name_origin

_NOT_AHEAD = re.compile(r"\(\?!(?:[^()\\]|\\.)*\)")


@dataclass(frozen=True)
class _Gap:
    """Layers that no rule covers in families of which rules cover others.

    rule      the first rule that covers a layer
    covering  the rule that covers each covered layer, of the first family
    """

    rule: Rule
    covered: frozenset[int]
    uncovered: frozenset[int]
    covering: dict[int, int]
    families: tuple[Family, ...]

    def joined(self, other: _Gap) -> _Gap | None:
        """Both as one; None where one covers what the other doesn't."""
        covered, uncovered = self.covered | other.covered, self.uncovered | other.uncovered
        if covered & uncovered:
            return None
        return replace(self, covered=covered, uncovered=uncovered, families=(*self.families, *other.families))


def check_gaps(matches: Matches, report: Report) -> None:
    """KT309. Where a pattern took too long, nobody knows what its rule covers."""
    if matches.failed:
        return
    by_rule: list[_Gap] = []
    for family in families(m for m, _ in matches.open):
        gap = _gap(family, matches)
        if gap is not None:
            _add(by_rule, gap, lambda a, b: a.rule is b.rule)
    gaps: list[_Gap] = []
    for gap in by_rule:
        if not _report_padding(gap, report):
            _add(gaps, gap, lambda a, b: a.uncovered == b.uncovered)
    for gap in gaps:
        _report_gap(gap, matches, report)


def _add(gaps: list[_Gap], gap: _Gap, alike: Callable[[_Gap, _Gap], bool]) -> None:
    """Add a gap, or make one with another that has the same cause."""
    for i, other in enumerate(gaps):
        joined = other.joined(gap) if alike(other, gap) else None
        if joined is not None:
            gaps[i] = joined
            return
    gaps.append(gap)


def _report_gap(gap: _Gap, matches: Matches, report: Report) -> None:
    """At the rule that begins after the gap, else the one that ends before it."""
    first, last = runs(gap.uncovered)[0]
    before = max((layer for layer in gap.covering if layer < first), default=None)
    after = min((layer for layer in gap.covering if layer > last), default=None)
    bordering = [matches.ruleset.rules[gap.covering[layer]] for layer in (after, before) if layer is not None]
    rule, other = bordering[0], bordering[-1]
    layers = layers_in_words(gap.uncovered)
    are, they = ("is", "it stays as it is") if len(gap.uncovered) == 1 else ("are", "they stay as they are")
    message = f"{layers} {are} covered by no rule while {in_words(gap.covered)} are ({_listed(gap)})"
    help = f"{they}, on {matches.ruleset.default_device}; widen a pattern to take {layers}, or add a rule that says so"
    related = [Related(f"rule {other.number} ends at layer {before}", name_origin(other))] if other is not rule else []
    severity = Severity.INFO if _is_stated(gap, matches) else Severity.WARNING
    report.report("KT309", severity, message, name_origin(rule), help=help, related=related)


def _listed(gap: _Gap) -> str:
    names = [inner_name(next(iter(f.by_layer.values()))) for f in gap.families]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_stated(gap: _Gap, matches: Matches) -> bool:
    """Whether the one rule that covers the others says itself that these are left out: it is a selector of the layers from one to
    another, alone in its file, or a look-ahead in its pattern refuses them."""
    rules = set(gap.covering.values())
    if len(rules) > 1:
        return False
    match = matches.ruleset.rules[rules.pop()].match
    if not isinstance(match, NameClass):
        inside = range(min(gap.covered), max(gap.covered) + 1)
        others = [r for r in matches.ruleset.rules if not isinstance(r.match, NameClass) and r.match.layers_written]
        return len(others) == 1 and others[0].match is match and not gap.uncovered.intersection(inside)
    bare = _NOT_AHEAD.sub("", match.name or "")
    if bare == match.name:
        return False
    try:
        pattern = compile_pattern(bare)
        left = [m for family in gap.families for layer, m in family.by_layer.items() if layer in gap.uncovered]
        return all(pattern.search(m.path) for m in left)
    except (PatternError, PatternTimeout):
        return False


def _gap(family: Family, matches: Matches) -> _Gap | None:
    covering: dict[int, int] = {}
    uncovered = []
    acts = False
    for layer, module in family.by_layer.items():
        decision = matches.decisions[module.index]
        if decision.rule is not None:
            covering[layer] = decision.rule
            acts = acts or bool(module.tensors) or matches.ruleset.rules[decision.rule].replace.operator.name != "default"
        elif decision.closed_by is None:
            uncovered.append(layer)
    if not covering or not uncovered or not acts:
        return None
    rule = matches.ruleset.rules[min(covering.values())]
    return _Gap(rule, frozenset(covering), frozenset(uncovered), covering, (family,))


def _report_padding(gap: _Gap, report: Report) -> bool:
    """Say of a pattern that asks for two digits that layer numbers have no leading zero; False where that isn't the reason."""
    padded = _needs_padding(gap)
    if padded is None:
        return False
    rule, (written, meant) = gap.rule, padded
    are = "is" if len(gap.uncovered) == 1 else "are"
    message = f"{layers_in_words(gap.uncovered)} {are} covered by no rule while {in_words(gap.covered)} are ({_listed(gap)})"
    message += f"; rule {rule.number} pattern {written} needs two digits, and layer numbers have no leading zero"
    numbers = number_regex(meant)
    name = rule.match.name if isinstance(rule.match, NameClass) and rule.match.name else ""
    whole = f"({written})" if f"({written})" in name else written
    fix = pattern_fix(f"write {numbers}", name_origin(rule), name.replace(whole, numbers, 1))
    report.error("KT309", message, name_origin(rule), help=f"write {numbers} for {written}", fix=fix)
    return True


def _needs_padding(gap: _Gap) -> tuple[str, set[int]] | None:
    """The pattern's number and the layers it was meant for, where it would take an uncovered layer if that were written 05."""
    name = gap.rule.match.name if isinstance(gap.rule.match, NameClass) else None
    number = NUMBER.search(name) if name is not None else None
    if name is None or number is None:
        return None
    pattern = compile_pattern(name)
    example = next(iter(gap.families[0].by_layer.values()))

    def takes(digits: str) -> bool:
        try:
            return pattern.search(f"{example.path}.".replace(f"layers.{example.layer}.", f"layers.{digits}.", 1)[:-1])
        except PatternTimeout:
            return False

    padded = {layer for layer in gap.uncovered if takes(f"0{layer}")}
    if not padded:
        return None
    meant = padded | {layer for layer in range(10, max(gap.covered | gap.uncovered) + 1) if takes(str(layer))}
    return number[1].strip("()"), meant
