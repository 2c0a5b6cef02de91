"""The walk over a tree that decides its modules, and the rules made ready to be asked in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktopt.clauses import BIG_SUBTREE, give_up, places_taken, refuse_given_up
from ktopt.diagnostics import Report
from ktopt.graph import Module, ModuleGraph
from ktopt.match.matches import Decision
from ktopt.match.places import Placed
from ktopt.pattern import Finder, PatternError, PatternTimeout, compile_pattern
from ktopt.pattern.prefix import PrefixFilter, prefix_filter
from ktopt.ruleset import NameClass, Rule, RuleSet
from ktopt.selector.surroundings import Surroundings
from ktopt.treeindex import class_names, index_of, names_class


@dataclass(frozen=True, slots=True)
class Contender:
    """One active rule, ready to be asked. A rule by name and class has `cls` and `find` (None where the clause is absent); one by
    selector has `places`, a set in bytes."""

    rule: int
    cls: str | None = None
    find: Finder | None = None
    places: bytes | None = None
    prefix: PrefixFilter | None = None


def contenders(
    ruleset: RuleSet, active: Sequence[bool | None], graph: ModuleGraph, around: Surroundings, report: Report
) -> list[Contender]:
    """The active rules whose clauses can be asked. A pattern that can't be compiled or took too long is a KT304."""
    found = []
    for rule in ruleset.rules:
        if active[rule.index] is False:
            continue
        try:
            found.append(_contender(rule, graph, around))
        except (PatternError, PatternTimeout) as error:
            report_pattern(rule, error, report)
    return found


def _contender(rule: Rule, graph: ModuleGraph, around: Surroundings) -> Contender:
    refuse_given_up(rule, graph)
    if not isinstance(rule.match, NameClass):
        index = index_of(graph)
        places = places_taken(rule, rule.match, graph, around)
        return Contender(rule.index, places=places.to_bytes((index.places + 7) // 8, "little"))
    name = rule.match.name
    if name is None:
        return Contender(rule.index, rule.match.cls)
    return Contender(rule.index, rule.match.cls, compile_pattern(name).finder, prefix=prefix_filter(name))


def report_pattern(rule: Rule, error: PatternError | PatternTimeout, report: Report) -> None:
    """KT304 at the rule's pattern."""
    origin = rule.match_origin
    if isinstance(rule.match, NameClass):
        origin = rule.match.name_origin or origin
    report.error("KT304", f"rule {rule.number}: {error}", origin)


_Asked = list[tuple[int, Finder | None, bytes | None]]
"""The rules that may take modules of one class: index, search of the path, set of places."""

FILTER_AFTER = 64
"""Modules of one subtree that are decided before it pays to drop the rules whose patterns can match nothing in it."""


class Walk:
    """One pass over the tree."""

    def __init__(
        self,
        rules: Sequence[Rule],
        graph: ModuleGraph,
        contenders: list[Contender],
        places: Placed | None,
        report: Report,
    ) -> None:
        self.rules, self.graph, self.report = rules, graph, report
        self.places = places.devices if places else None
        self.also = places.also if places else {}
        self.contenders = contenders
        self.decisions: list[Decision] = []
        self.shared: dict[tuple[int | None, int | None, str | None], Decision] = {}
        self.of_class: dict[tuple[int, tuple[str, ...]], frozenset[int]] = {}
        self.closers: set[str] = set()
        self.failed: set[int] = set()

    def run(self) -> tuple[Decision, ...]:
        self._walk(0, len(self.graph), None, self.contenders)
        return tuple(self.decisions)

    def _walk(self, start: int, end: int, owner: Module | None, contenders: list[Contender]) -> None:
        """Decide the modules of range(start, end), which are all that is below `owner`."""
        modules, places, rules, decisions = self.graph.modules, self.places, self.rules, self.decisions
        asked: dict[tuple[int, tuple[str, ...]], _Asked] = {}
        i, visited = start, 0
        while i < end:
            module = modules[i]
            key = (id(module.cls), module.alias_classes)
            candidates = asked.get(key)
            if candidates is None:
                candidates = asked[key] = self._candidates(key, module, contenders)
            if module.alias_paths:
                decision = self._with_aliases(module)
            else:
                decision = self._decision(self._winner(module.path, i, candidates), None, places[i] if places else None)
            decisions.append(decision)
            visited += 1
            i += 1
            if module.end > i:
                if decision.rule is not None and not rules[decision.rule].recursive:
                    self._close(module)
                    i = module.end
                elif module.end - i > BIG_SUBTREE:
                    self._walk(i, module.end, module, contenders)
                    i = module.end
            if visited == FILTER_AFTER and owner is not None and owner.path:
                contenders = _possible(owner, contenders)
                asked = {}

    def _candidates(self, key: tuple[int, tuple[str, ...]], module: Module, contenders: list[Contender]) -> _Asked:
        """The rules whose class clause the module's class meets."""
        fitting = self.of_class.get(key)
        if fitting is None:
            fitting = self.of_class[key] = self._fitting(module)
        return [(c.rule, c.find, c.places) for c in contenders if c.rule in fitting]

    def _fitting(self, module: Module) -> frozenset[int]:
        names = class_names(module.cls, module.alias_classes)
        return frozenset(c.rule for c in self.contenders if c.cls is None or any(names_class(c.cls, dotted) for dotted in names))

    def _winner(self, path: str, place: int, asked: _Asked) -> int | None:
        """The first rule that takes the place."""
        for rule, find, places in asked:
            if find is not None:
                if rule in self.failed:
                    continue
                try:
                    if find(path):
                        return rule
                except PatternTimeout as error:
                    report_pattern(self.rules[rule], error, self.report)
                    self.failed.add(rule)
                    give_up(self.rules[rule], self.graph, error)
            elif places is None or places[place >> 3] >> (place & 7) & 1:
                return rule
        return None

    def _with_aliases(self, module: Module) -> Decision:
        place = self.places[module.index] if self.places else None
        asked = self._candidates((id(module.cls), module.alias_classes), module, self.contenders)
        own = self._winner(module.path, module.index, asked)
        first = index_of(self.graph).first_alias_place[module.index]
        won: dict[int, str] = {}
        for offset, alias in enumerate(module.alias_paths):
            if self._in_closed(alias):
                continue
            rule = self._winner(alias, first + offset, asked)
            if rule is not None:
                won.setdefault(rule, alias)
        if not won or (own is not None and own < min(won)):
            return self._decision(own, None, place)
        winners = tuple(sorted(won))
        return Decision(winners[0], won[winners[0]], winners, None, place, self.also.get(module.index, ()))

    def _in_closed(self, alias: str) -> bool:
        """Whether an alias lies below a module that a rule has closed."""
        at = alias.rfind(".")
        while at > 0:
            if alias[:at] in self.closers:
                return True
            at = alias.rfind(".", 0, at)
        return False

    def _close(self, module: Module) -> None:
        """What is below the module belongs to its rule."""
        self.closers.update((module.path, *module.alias_paths))
        if self.places is None:
            self.decisions.extend([Decision(closed_by=module.index)] * (module.end - module.index - 1))
        else:
            below = range(module.index + 1, module.end)
            self.decisions.extend(self._decision(None, module.index, self.places[i]) for i in below)

    def _decision(self, rule: int | None, closed_by: int | None, place: str | None) -> Decision:
        key = (rule, closed_by, place)
        found = self.shared.get(key)
        if found is None:
            found = self.shared[key] = Decision(rule, "", (), closed_by, place)
        return found


def _possible(owner: Module, contenders: list[Contender]) -> list[Contender]:
    """The rules that may take something below `owner`, by its own path."""
    prefix = f"{owner.path}."
    first, last = owner.index >> 3, (owner.end + 7) >> 3
    return [
        c
        for c in contenders
        if (any(c.places[first:last]) if c.places is not None else c.prefix is None or c.prefix.possible(prefix))
    ]
