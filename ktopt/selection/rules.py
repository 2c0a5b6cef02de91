"""What one rule takes, against what it says: nothing (KT301), nothing that is left (KT302, KT303), or another number (KT307)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ktopt.diagnostics import Diagnostic, Related, Report
from ktopt.match import Matches
from ktopt.ruleset import NameClass, Rule
from ktopt.selection.families import in_words
from ktopt.selection.nothing import explain_nothing
from ktopt.selection.terms import only_dead_term
from ktopt.selection.without import takes_somewhere, won_without
from ktopt.source import Origin
from ktopt.treeindex import members


def check_rule(rule: Rule, matches: Matches, report: Report, varied: Collection[int] = ()) -> None:
    """KT301, KT302, KT303 and KT307 of a rule that applies. `varied` are rules whose conditions are looked at both ways elsewhere:
    a rule that only they keep from its modules is judged there."""
    if matches.active[rule.index] is False or rule.index in matches.failed:
        return
    takes, won = matches.takes(rule.index), matches.won(rule.index)
    if not takes:
        if not isinstance(rule.match, NameClass) and takes_somewhere(rule.match, matches.graph):
            return  # it is inactive here, as one whose `when` does not hold
        _report_nothing(rule, matches, report)
    elif not won:
        _report_unreachable(rule, takes, matches, report, varied)
    elif takes & ~won:
        _report_shadowed(rule, takes & ~won, won, matches, report)
    if rule.expect is not None and won.bit_count() != rule.expect and rule.index not in matches.failed:
        _report_expect(rule, won, matches, report, varied)


def where(rule: Rule) -> Origin:
    """Where the rule says what it matches: its name, else its class, else the whole of `match`."""
    if isinstance(rule.match, NameClass):
        return rule.match.name_origin or rule.match.cls_origin or rule.match_origin
    return rule.match_origin


def _report_nothing(rule: Rule, matches: Matches, report: Report) -> None:
    found = explain_nothing(rule, matches)
    if not isinstance(rule.match, NameClass) and (term := only_dead_term(rule.match, matches.graph)):
        related = (Related(f"rule {rule.number} uses it", rule.match_origin),) if term.let else ()
        found = replace(found, message=f"rule {rule.number} matches nothing: {term.message}", origin=term.origin, related=related)
    if not already_said(found.code, found.origin, report):
        report.error(found.code, found.message, found.origin, help=found.help, related=found.related, fix=found.fix)


def already_said(code: str, at: Origin, report: Iterable[Diagnostic]) -> bool:
    """Whether a rule that takes nothing is reported on this line as that, or as one with a literal backslash."""
    return any(d.code in (code, "KT308") and d.file == at.file and d.span.start.line == at.span.start.line for d in report)


def owners(modules: int, matches: Matches) -> dict[int, int]:
    """Which rules took these modules, or closed the subtree that they are in: rule index -> how many."""
    counts = {rule.index: (matches.holds(rule.index) & modules).bit_count() for rule in matches.ruleset.rules}
    return {rule: count for rule, count in counts.items() if count}


def _report_unreachable(rule: Rule, takes: int, matches: Matches, report: Report, varied: Collection[int]) -> None:
    by_rule = owners(takes, matches)
    rules = [matches.ruleset.rules[i] for i in by_rule]
    closers = [r for r in rules if r.index > rule.index]
    earlier = [r for r in rules if r.index < rule.index]
    related = _related(by_rule, matches)
    if won_without(rule, matches, varied):
        message = f"rule {rule.number} takes nothing here: what it matches is taken by {_named(rules)}, whose condition holds"
        report.info("KT302", message, rule.origin, related=related)
        return
    message = f"rule {rule.number} is unreachable: every module it matches is already taken by {_named(rules)}"
    if closers:
        message += f"; `recursive: false` of {_named(closers)} closes what is below its modules"
    help = (
        f"move rule {rule.number} above {_named(earlier)}" if earlier else "take the rule out, or let the closing rule go on below"
    )
    report.error("KT302", message, rule.origin, help=help, related=related)


def _report_expect(rule: Rule, won: int, matches: Matches, report: Report, varied: Collection[int]) -> None:
    """KT307, unless the number is right without the rules whose conditions happen to hold."""
    alone = won_without(rule, matches, varied)
    said = not matches.takes(rule.index) or not (won or alone or varied)  # that it takes nothing, and why
    if said or alone.bit_count() == rule.expect:
        return
    taken = in_words(matches.graph, members(won)) if won else "none"
    message = f"rule {rule.number} was to take {rule.expect} modules and takes {won.bit_count()}: {taken}"
    if alone.bit_count() != won.bit_count():
        message += f"; without the rules before it that hold on some machines only, {alone.bit_count()}"
    report.error("KT307", message, rule.expect_origin or rule.origin, help="mend the match, or the number")


def _named(rules: Iterable[Rule], most: int = 4) -> str:
    """Rules with their lines: "rule 1 (line 3) and rule 4 (line 20)"."""
    listed = list(rules)
    words = [f"rule {r.number} (line {r.origin.span.start.line})" for r in listed[:most]]
    if len(listed) > most:
        words.append(f"{len(listed) - most} more")
    return " and ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} and {words[-1]}"


def _related(by_rule: dict[int, int], matches: Matches) -> list[Related]:
    return [Related(f"rule {i + 1} takes {count} of them", where(matches.ruleset.rules[i])) for i, count in by_rule.items()]


def _report_shadowed(rule: Rule, lost: int, won: int, matches: Matches, report: Report) -> None:
    by_rule = owners(lost, matches)
    if not by_rule:
        return
    total = lost.bit_count() + won.bit_count()
    rules = [matches.ruleset.rules[i] for i in by_rule]
    gone = f"{lost.bit_count()} {'is' if lost.bit_count() == 1 else 'are'} taken by {_named(rules)}"
    message = f"rule {rule.number} matches {total} modules and decides {won.bit_count()}: {gone}"
    report.info("KT303", message, where(rule), related=_related(by_rule, matches))
