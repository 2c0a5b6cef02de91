"""Layer numbers in patterns: ones that take more layers than they name, fewer, or layers that the model doesn't have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ktopt.diagnostics import Related, Report, Severity
from ktopt.graph import ModuleGraph
from ktopt.match import Matches, report_pattern
from ktopt.pattern import Pattern, PatternError, PatternTimeout, compile_pattern
from ktopt.pattern.check import pattern_fix
from ktopt.pattern.numbers import in_words, number_regex
from ktopt.ruleset import NameClass, Rule
from ktopt.selection.families import Family, families, inner_name
from ktopt.selection.nothing import layers_beyond
from ktopt.selection.rules import where
from ktopt.selection.spots import part_of
from ktopt.source import Origin
from ktopt.treeindex import members

_NUMBER = re.compile(r"(?<=layers)(?:\\?\.)((?:\d|\\d|\[\d[^\]]*\])+|\((?!\?)[^()]*\d[^()]*\))")
"""In a pattern, what stands for the layer's number: digits and classes, or one group."""

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
            report_beyond(f"rule {rule.number}", rule.match.layers_written, _origin(rule), matches.graph, report)
    _check_gaps(matches, report)


def _origin(rule: Rule) -> Origin:
    return (rule.match.name_origin if isinstance(rule.match, NameClass) else None) or rule.match_origin


def _check_open_number(rule: Rule, name: str, matches: Matches, report: Report) -> None:
    """KT305: `layers\\.1` also takes 10 to 19, since nothing ends the number."""
    number = _NUMBER.search(name)
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
    fix = pattern_fix("end the number there", _origin(rule), name[: number.end()] + ending + rest)
    severity = Severity.ERROR if swallowed else Severity.WARNING
    at = part_of(_origin(rule), name, number.start(1), number.end(1))
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
        and _NUMBER.search(other.match.name or "")
        and matches.takes(other.index)
        and not matches.won(other.index)
        and not matches.takes(other.index) & ~takes
    ]


def _check_beyond(rule: Rule, name: str, matches: Matches, report: Report) -> None:
    """KT306: a layer number written out that the model doesn't reach. A digit class such as 6[0-9] may well reach past the end."""
    count = matches.graph.layer_count
    written = {int(n) for part in _NUMBER.finditer(name) for n in _LITERAL_NUMBER.findall(part[1]) if len(n) < 6}
    candidates = {n for n in written if n >= count}
    try:
        beyond = candidates.intersection(layers_beyond(name, matches.graph)) if candidates else set()
    except PatternTimeout as error:
        report_pattern(rule, error, report)
        return
    report_beyond(f"rule {rule.number}", beyond, _origin(rule), matches.graph, report)


def report_beyond(who: str, written: Iterable[int], origin: Origin, graph: ModuleGraph, report: Report) -> None:
    """KT306 for those of the layer numbers written that the model doesn't reach."""
    beyond = {n for n in written if n >= graph.layer_count}
    if not beyond or not graph.layer_count:
        return
    last = graph.layer_count - 1
    message = f"{who} names layer {in_words(beyond)}, and {graph.name or 'this model'} has layers 0-{last}"
    report.error("KT306", message, origin, help=f"the last layer is {last}; a native file can leave the end open, as in 30..")


@dataclass(frozen=True)
class _Gap:
    """Layers that no rule covers in families of which `rule` covers others."""

    rule: Rule
    covered: frozenset[int]
    uncovered: frozenset[int]


def _check_gaps(matches: Matches, report: Report) -> None:
    """KT309. Where a pattern took too long, nobody knows what its rule covers."""
    if matches.failed:
        return
    gaps: list[tuple[_Gap, list[Family]]] = []
    for family in families(m for m, _ in matches.open):
        gap = _gap(family, matches)
        if gap is None:
            continue
        for i, (other, found) in enumerate(gaps):
            joined = _Gap(gap.rule, gap.covered | other.covered, gap.uncovered | other.uncovered)
            if gap.rule is other.rule and not joined.covered & joined.uncovered:
                gaps[i] = (joined, [*found, family])
                break
        else:
            gaps.append((gap, [family]))
    for gap, found in gaps:
        _report_gap(gap, found, matches, report)


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
    return _Gap(matches.ruleset.rules[min(covering.values())], frozenset(covering), frozenset(uncovered))


def _report_gap(gap: _Gap, found: list[Family], matches: Matches, report: Report) -> None:
    rule = gap.rule
    names = [inner_name(next(iter(f.by_layer.values()))) for f in found]
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    message = f"layers {in_words(gap.uncovered)} are covered by no rule while {in_words(gap.covered)} are ({listed})"
    padded = _needs_padding(gap, found)
    if padded:
        written, meant = padded
        message += f"; rule {rule.number} pattern {written} needs two digits, and layer numbers have no leading zero"
        numbers = number_regex(meant)
        name = rule.match.name if isinstance(rule.match, NameClass) and rule.match.name else ""
        whole = f"({written})" if f"({written})" in name else written
        fix = pattern_fix(f"write {numbers}", _origin(rule), name.replace(whole, numbers, 1))
        report.report("KT309", Severity.ERROR, message, _origin(rule), help=f"write {numbers} for {written}", fix=fix)
        return
    device = matches.ruleset.default_device
    help = f"they stay as they are, on {device}; widen a pattern to take them, or add a rule that says so"
    report.warning("KT309", message, _origin(rule), help=help)


def _needs_padding(gap: _Gap, found: list[Family]) -> tuple[str, set[int]] | None:
    """The pattern's number and the layers it was meant for, where it would take an uncovered layer if that were written 05."""
    name = gap.rule.match.name if isinstance(gap.rule.match, NameClass) else None
    number = _NUMBER.search(name) if name is not None else None
    if name is None or number is None:
        return None
    pattern = compile_pattern(name)
    example = next(iter(found[0].by_layer.values()))

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
