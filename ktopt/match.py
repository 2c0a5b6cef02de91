"""The match stage: which rule decides each module.

The tree is walked from the root, a parent before what is below it. Each of a module's paths is won by the first rule, in the file's
order, that takes it; a winner with `recursive: false` closes the module's subtree to every rule. Where a module has alias paths,
the rules that won those decide, unless its own path was won by an earlier rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ktopt.clauses import BIG_SUBTREE, give_up, modules_taken, places_taken, refuse_given_up
from ktopt.diagnostics import Report
from ktopt.graph import Module, ModuleGraph
from ktopt.pattern import Finder, PatternError, PatternTimeout, compile_pattern
from ktopt.pattern.prefix import PrefixFilter, prefix_filter
from ktopt.placement import Hardware
from ktopt.placing import Placed, place_modules
from ktopt.ruleset import NameClass, Rule, RuleSet
from ktopt.treeindex import class_names, index_of, members, names_class, set_of, span_of


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules say of one module.

    rule          the deciding rule's index, or None where no rule takes the module
    alias         the alias path by which it was decided, or ""
    alias_rules   where aliases decide: the distinct rules that won one, in order of precedence
    closed_by     the ancestor (a module index) whose rule has `recursive: false` and so owns this module
    place         the device that a native file's `place:` gives it
    also          where aliases decide: further devices that `place:` gives to some of them
    """

    rule: int | None = None
    alias: str = ""
    alias_rules: tuple[int, ...] = ()
    closed_by: int | None = None
    place: str | None = None
    also: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Matches:
    """Every module's decision, and the sets of modules behind them.

    decisions        aligned with graph.modules
    active           whether each rule applies on this hardware; None where that isn't known, and the rule is then treated as active
    needs_hardware   rules whose effect depends on hardware that isn't known
    """

    ruleset: RuleSet
    graph: ModuleGraph
    decisions: tuple[Decision, ...]
    active: tuple[bool | None, ...]
    needs_hardware: tuple[int, ...] = ()
    hardware: Hardware | None = None
    _takes: dict[int, int] = field(default_factory=dict, repr=False)
    _won: dict[int, int] = field(default_factory=dict, repr=False)
    _holds: dict[int, int] = field(default_factory=dict, repr=False)

    def takes(self, rule_index: int) -> int:
        """The modules that the rule's clauses select, whatever other rules do. An inactive rule's too."""
        found = self._takes.get(rule_index)
        if found is None:
            rule = self.ruleset.rules[rule_index]
            found = self._takes[rule_index] = modules_taken(rule, self.graph, self.hardware)
        return found

    @cached_property
    def open(self) -> list[tuple[Module, Decision]]:
        """The modules that aren't inside a closed one, each with its decision."""
        return [(m, d) for m, d in zip(self.graph.modules, self.decisions, strict=True) if d.closed_by is None]

    def won(self, rule_index: int) -> int:
        """The modules that the rule decides, alone or with other rules by aliases."""
        if not self._won:
            groups: dict[int, list[int]] = {i: [] for i in range(len(self.ruleset.rules))}
            for module, decision in self.open:
                if decision.rule is not None:
                    for rule in decision.alias_rules or (decision.rule,):
                        groups[rule].append(module.index)
            self._won.update({rule: set_of(indices, len(self.graph)) for rule, indices in groups.items()})
        return self._won[rule_index]

    def holds(self, rule_index: int) -> int:
        """The modules that the rule decides, and all that is inside those that it closes."""
        found = self._holds.get(rule_index)
        if found is None:
            found = self.won(rule_index)
            if not self.ruleset.rules[rule_index].recursive:
                for index in members(found):
                    found |= span_of(index, self.graph.modules[index].end)
            self._holds[rule_index] = found
        return found

    def device(self, index: int) -> str:
        """Where a module's weights live: the device that its rule gives, else its place, else the default device. A closed module's
        are where the ancestor's are that owns it."""
        decision = self.decisions[index]
        if decision.closed_by is not None:
            return self.device(decision.closed_by)
        given = None
        if decision.rule is not None:
            given = getattr(self.ruleset.rules[decision.rule].replace.config, "generate_device", None)
        return given or decision.place or self.ruleset.default_device


def match(ruleset: RuleSet, graph: ModuleGraph, hardware: Hardware | None, report: Report) -> Matches:
    """Decide every module. A pattern that can't be compiled, or takes too long, is reported (KT304) and its rule takes nothing."""
    active = tuple(_is_active(rule, graph, hardware, report) for rule in ruleset.rules)
    contenders = _contenders(ruleset, active, graph, hardware, report)
    places = place_modules(ruleset, graph, hardware, report)
    walk = _Walk(ruleset.rules, graph, contenders, places, report)
    decisions = walk.run()
    failed = {rule.index for rule in ruleset.rules if active[rule.index] is not False} - {c.rule for c in contenders} | walk.failed
    needs = _need_hardware(ruleset, active, hardware)
    return Matches(ruleset, graph, decisions, active, needs, hardware, _takes=dict.fromkeys(failed, 0))


def _is_active(rule: Rule, graph: ModuleGraph, hardware: Hardware | None, report: Report) -> bool | None:
    if rule.when is None:
        return True
    if rule.when.asks_modules:
        message = f"rule {rule.number}: `when` can ask of config.KEY and hw.KEY only, not of modules"
        report.error("KT310", message, rule.when.origin, help="put what chooses modules into `match`")
        return False
    return rule.when.evaluate_when(graph.config, hardware)


def _need_hardware(ruleset: RuleSet, active: Sequence[bool | None], hardware: Hardware | None) -> tuple[int, ...]:
    def asks(rule: Rule) -> bool:
        return hardware is None and not isinstance(rule.match, NameClass) and rule.match.asks_hardware

    return tuple(rule.index for rule in ruleset.rules if active[rule.index] is None or asks(rule))


@dataclass(frozen=True, slots=True)
class _Contender:
    """One active rule, ready to be asked. A rule by name and class has `cls` and `find` (None where the clause is absent); one by
    selector has `places`, a set in bytes."""

    rule: int
    cls: str | None = None
    find: Finder | None = None
    places: bytes | None = None
    prefix: PrefixFilter | None = None


def _contenders(
    ruleset: RuleSet, active: Sequence[bool | None], graph: ModuleGraph, hardware: Hardware | None, report: Report
) -> list[_Contender]:
    found = []
    for rule in ruleset.rules:
        if active[rule.index] is False:
            continue
        try:
            found.append(_contender(rule, graph, hardware))
        except (PatternError, PatternTimeout) as error:
            report_pattern(rule, error, report)
    return found


def _contender(rule: Rule, graph: ModuleGraph, hardware: Hardware | None) -> _Contender:
    refuse_given_up(rule, graph)
    if not isinstance(rule.match, NameClass):
        index = index_of(graph)
        places = places_taken(rule, rule.match, graph, hardware)
        return _Contender(rule.index, places=places.to_bytes((index.places + 7) // 8, "little"))
    name = rule.match.name
    if name is None:
        return _Contender(rule.index, rule.match.cls)
    return _Contender(rule.index, rule.match.cls, compile_pattern(name).finder, prefix=prefix_filter(name))


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


class _Walk:
    """One pass over the tree."""

    def __init__(
        self,
        rules: Sequence[Rule],
        graph: ModuleGraph,
        contenders: list[_Contender],
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

    def _walk(self, start: int, end: int, owner: Module | None, contenders: list[_Contender]) -> None:
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

    def _candidates(self, key: tuple[int, tuple[str, ...]], module: Module, contenders: list[_Contender]) -> _Asked:
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
                try:
                    if find(path):
                        return rule
                except PatternTimeout as error:
                    report_pattern(self.rules[rule], error, self.report)
                    self.failed.add(rule)
                    give_up(self.rules[rule], self.graph)
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


def _possible(owner: Module, contenders: list[_Contender]) -> list[_Contender]:
    """The rules that may take something below `owner`, by its own path."""
    prefix = f"{owner.path}."
    first, last = owner.index >> 3, (owner.end + 7) >> 3
    return [
        c
        for c in contenders
        if (any(c.places[first:last]) if c.places is not None else c.prefix is None or c.prefix.possible(prefix))
    ]
