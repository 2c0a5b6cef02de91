"""Layer numbers in patterns: ones that take more layers than they name, fewer, or layers that the model doesn't have."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ktopt.diagnostics import Related, Report, Severity
from ktopt.graph import ModuleGraph
from ktopt.match import Matches, report_pattern
from ktopt.pattern import Pattern, PatternError, PatternTimeout, compile_pattern
from ktopt.pattern.check import pattern_fix
from ktopt.pattern.numbers import in_words
from ktopt.ruleset import NameClass, Rule
from ktopt.selection.gaps import check_gaps
from ktopt.selection.nothing import layers_beyond
from ktopt.selection.rules import where
from ktopt.selection.spots import NUMBER, name_origin, part_of
from ktopt.selection.terms import alternatives
from ktopt.source import Origin
from ktopt.treeindex import members

_IN_PATH = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")

_LITERAL_NUMBER = re.compile(r"(?<![\d\\{\]-])(\d+)(?![\d\]\[-])")


def check_layers(matches: Matches, report: Report) -> None:
    """KT305, KT306 and KT309 for every active rule that names layers."""
    if not matches.graph.layer_count:
        return
    for rule in matches.ruleset.rules:
        if matches.active[rule.index] is False or not matches.takes(rule.index):
            continue
        if isinstance(rule.match, NameClass):
            if rule.match.name is not None:
                _check_open_number(rule, rule.match.name, matches, report)
                _check_beyond(rule, rule.match.name, matches, report)
        else:
            report_beyond(f"rule {rule.number}", rule.match.layers_written, name_origin(rule), matches.graph, report)
    check_gaps(matches, report)


def _check_open_number(rule: Rule, name: str, matches: Matches, report: Report) -> None:
    """KT305: `layers\\.1` also takes 10 to 19, since nothing ends the number."""
    number = NUMBER.search(name)
    if number is None or name.startswith("\\.", number.end()) or name[number.end() : number.end() + 1] in ("+", "*", "{"):
        return  # closed, or any number as in \d+
    try:
        taken = _layers_named(matches, rule, compile_pattern(name))
        meant = _layers_named(matches, rule, compile_pattern(name[: number.end()] + "(?![0-9])" + name[number.end() :]))
    except (PatternError, PatternTimeout):
        return
    extra = taken - meant
    swallowed = _swallowed(rule, matches)
    if not meant or not extra or (len(taken) == matches.graph.layer_count and "|" not in number[1] and not swallowed):
        return
    written = number[1]
    message = (
        f"rule {rule.number} also takes layers {in_words(extra)} beside {in_words(meant)}: nothing in its pattern ends the number "
        f"after `{written}`"
    )
    rest = name[number.end() :]
    ending = r"(\.|$)" if not rest else r"\." if rest.startswith((".*", "(?!")) else "(?![0-9])"
    fix = pattern_fix("end the number there", name_origin(rule), name[: number.end()] + ending + rest)
    severity = Severity.ERROR if swallowed else Severity.WARNING
    at = part_of(name_origin(rule), name, number.start(1), number.end(1))
    related = [Related(f"rule {other.number} gets nothing because of it", where(other)) for other in swallowed]
    help = f"write `{written}\\.` so that the number ends there"
    report.report("KT305", severity, message, at, help=help, related=related, fix=fix)


def _layers_named(matches: Matches, rule: Rule, pattern: Pattern) -> set[int]:
    """The layers in those paths of the rule's modules that a pattern is found in. PatternTimeout."""
    found = set()
    for module in (matches.graph.modules[i] for i in members(matches.takes(rule.index))):
        for path in (module.path, *module.alias_paths):
            layer = _IN_PATH.search(path)
            if layer is not None and pattern.search(path):
                found.add(int(layer[1]))
    return found


def _swallowed(rule: Rule, matches: Matches) -> list[Rule]:
    """Later rules that name layers and get nothing, since this one takes all that they match."""
    takes = matches.takes(rule.index)
    return [
        other
        for other in matches.ruleset.rules[rule.index + 1 :]
        if isinstance(other.match, NameClass)
        and NUMBER.search(other.match.name or "")
        and matches.takes(other.index)
        and not matches.won(other.index)
        and not matches.takes(other.index) & ~takes
    ]


def _check_beyond(rule: Rule, name: str, matches: Matches, report: Report) -> None:
    """KT306: a layer number written out that the model doesn't reach. A digit class such as 6[0-9] may well reach past the end."""
    count = matches.graph.layer_count
    written = {int(n) for part in NUMBER.finditer(name) for n in _LITERAL_NUMBER.findall(part[1]) if len(n) < 6}
    candidates = {n for n in written if n >= count}
    try:
        beyond = candidates.intersection(layers_beyond(name, matches.graph)) if candidates else set()
    except PatternTimeout as error:
        report_pattern(rule, error, report)
        return
    report_beyond(f"rule {rule.number}", beyond, name_origin(rule), matches.graph, report)
    if not beyond:
        _check_dead_alternatives(rule, name, matches.graph, report)


def _check_dead_alternatives(rule: Rule, name: str, graph: ModuleGraph, report: Report) -> None:
    """KT306, a warning, for an alternative of a number, such as 7[0-9], all of whose numbers are beyond the model."""
    for number in NUMBER.finditer(name):
        written = alternatives(number[1].strip("()"))
        for part in written if len(written) > 1 else ():
            try:
                pattern = compile_pattern(f"^(?:{part})$")
                if any(pattern.search(str(n)) for n in range(graph.layer_count)):
                    continue
                numbers = {n for n in range(graph.layer_count, 1000) if pattern.search(str(n))}
            except (PatternError, PatternTimeout):
                continue
            if numbers:
                last = graph.layer_count - 1
                model = graph.name or "this model"
                message = f"rule {rule.number}: `{part}` is layers {in_words(numbers)}, and {model} has layers 0-{last}"
                start = name.index(part, number.start(1))
                at = part_of(name_origin(rule), name, start, start + len(part))
                report.warning("KT306", message, at, help=f"the last layer is {last}")


def report_beyond(who: str, written: Iterable[int], origin: Origin, graph: ModuleGraph, report: Report) -> None:
    """KT306 for those of the layer numbers written that the model doesn't reach."""
    beyond = {n for n in written if n >= graph.layer_count}
    if not beyond or not graph.layer_count:
        return
    last = graph.layer_count - 1
    message = f"{who} names layer {in_words(beyond)}, and {graph.name or 'this model'} has layers 0-{last}"
    report.error("KT306", message, origin, help=f"the last layer is {last}; a native file can leave the end open, as in 30..")
