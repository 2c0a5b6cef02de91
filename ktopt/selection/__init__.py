"""Whether a rule file selects what it seems to: rules that match nothing or never come to act, and layers that are left out."""

from __future__ import annotations

from collections.abc import Iterable

from ktopt.diagnostics import Related, Report, Severity
from ktopt.match import Matches
from ktopt.ruleset import NameClass, Rule
from ktopt.selection.families import in_words
from ktopt.selection.layers import check_layers
from ktopt.selection.nothing import explain_nothing
from ktopt.selection.structure import check_structure
from ktopt.source import Origin
from ktopt.treeindex import members


def check_selection(matches: Matches, report: Report) -> None:
    """Add what KT3, KT407, KT5 and KT6 have to say of a rule file on a model."""
    for rule in matches.ruleset.rules:
        if matches.active[rule.index] is not False and not _has_bad_pattern(rule, report):
            _check_rule(rule, matches, report)
    check_layers(matches, report)
    check_structure(matches, report)


def where(rule: Rule) -> Origin:
    """Where the rule says what it matches: its name, else its class, else the whole of `match`."""
    if isinstance(rule.match, NameClass):
        return rule.match.name_origin or rule.match.cls_origin or rule.match_origin
    return rule.match_origin


def _has_bad_pattern(rule: Rule, report: Report) -> bool:
    at = where(rule)
    return any(d.code == "KT304" and d.severity is Severity.ERROR and (d.file, d.span) == (at.file, at.span) for d in report)


def _check_rule(rule: Rule, matches: Matches, report: Report) -> None:
    takes, won = matches.takes(rule.index), matches.won(rule.index)
    if not takes:
        _report_nothing(rule, matches, report)
    elif not won:
        _report_unreachable(rule, takes, matches, report)
    elif takes & ~won:
        _report_shadowed(rule, takes & ~won, won, matches, report)
    if rule.expect is not None and won.bit_count() != rule.expect:
        taken = in_words(matches.graph, members(won)) if won else "none"
        message = f"rule {rule.number} was to take {rule.expect} modules and takes {won.bit_count()}: {taken}"
        report.error("KT307", message, rule.expect_origin or rule.origin, help="mend the match, or the number")


def _report_nothing(rule: Rule, matches: Matches, report: Report) -> None:
    found = explain_nothing(rule, matches)
    same_line = {d.code for d in report if d.file == found.origin.file and d.span.start.line == found.origin.span.start.line}
    if found.code in same_line or "KT308" in same_line:
        return
    report.error(found.code, found.message, found.origin, help=found.help, related=found.related, fix=found.fix)


def owners(modules: int, matches: Matches) -> dict[int, int]:
    """Which rules took these modules, or closed the subtree that they are in: rule index -> how many."""
    counts = {rule.index: (matches.holds(rule.index) & modules).bit_count() for rule in matches.ruleset.rules}
    return {rule: count for rule, count in counts.items() if count}


def _report_unreachable(rule: Rule, takes: int, matches: Matches, report: Report) -> None:
    by_rule = owners(takes, matches)
    if any(matches.active[i] is None and not _same_condition(matches.ruleset.rules[i], rule) for i in by_rule):
        return  # an earlier rule that may be inactive on the real machine takes nothing for certain
    rules = [matches.ruleset.rules[i] for i in by_rule]
    closers = [r for r in rules if r.index > rule.index]
    earlier = [r for r in rules if r.index < rule.index]
    message = f"rule {rule.number} is unreachable: every module it matches is already taken by {_named(rules)}"
    if closers:
        message += f"; `recursive: false` of {_named(closers)} closes what is below its modules"
    help = (
        f"move rule {rule.number} above {_named(earlier)}" if earlier else "take the rule out, or let the closing rule go on below"
    )
    report.error("KT302", message, rule.origin, help=help, related=_related(by_rule, matches))


def _same_condition(a: Rule, b: Rule) -> bool:
    return a.when is not None and b.when is not None and a.when.text == b.when.text


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
