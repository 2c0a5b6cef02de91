"""What the match stage makes: every module's decision, and the sets of modules behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from ktopt.clauses import modules_taken
from ktopt.graph import Module, ModuleGraph
from ktopt.match.places import Placed
from ktopt.pattern import PatternError, PatternTimeout
from ktopt.placement import Hardware
from ktopt.ruleset import NameClass, Rule, RuleSet, rule_devices
from ktopt.selector.fields import about_machine, about_storage
from ktopt.selector.surroundings import NOTHING, Surroundings
from ktopt.source import Origin
from ktopt.treeindex import members, set_of, span_of


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

    decisions   aligned with graph.modules
    active      whether each rule applies on this hardware; None where that isn't known, and the rule is then treated as active
    around      what is known of the machine and of the weights
    failed      rules whose pattern took too long, which take nothing; it grows as more is asked
    slow        why those failed that did so after matching was done
    placed      what `place:` says; None where the file has none
    """

    ruleset: RuleSet
    graph: ModuleGraph
    decisions: tuple[Decision, ...]
    active: tuple[bool | None, ...]
    around: Surroundings = NOTHING
    failed: set[int] = field(default_factory=set, repr=False)
    slow: dict[int, PatternError | PatternTimeout] = field(default_factory=dict, repr=False)
    placed: Placed | None = None
    _takes: dict[int, int] = field(default_factory=dict, repr=False)
    _won: dict[int, int] = field(default_factory=dict, repr=False)
    _holds: dict[int, int] = field(default_factory=dict, repr=False)
    _devices: dict[int, str] = field(default_factory=dict, repr=False)

    def takes(self, rule_index: int) -> int:
        """The modules that the rule's clauses select, whatever other rules do. An inactive rule's too."""
        if rule_index in self.failed:
            return 0
        found = self._takes.get(rule_index)
        if found is None:
            try:
                found = modules_taken(self.ruleset.rules[rule_index], self.graph, self.around)
            except (PatternError, PatternTimeout) as error:
                self.failed.add(rule_index)
                self.slow[rule_index] = error
                return 0
            self._takes[rule_index] = found
        return found

    @property
    def hardware(self) -> Hardware | None:
        """The machine, where it is known."""
        return self.around.hardware

    @cached_property
    def needs_hardware(self) -> tuple[int, ...]:
        """Rules whose effect depends on a machine that isn't known."""
        return tuple(r.index for r in self.ruleset.rules if self.active[r.index] is None or self._lacks(r, about_machine))

    @cached_property
    def needs_weights(self) -> tuple[int, ...]:
        """Rules that ask how weights are stored, where that isn't known."""
        return tuple(r.index for r in self.ruleset.rules if self.active[r.index] is not False and self._lacks(r, about_storage))

    def _lacks(self, rule: Rule, kind: Callable[[str], bool]) -> bool:
        return not isinstance(rule.match, NameClass) and any(map(kind, rule.match.lacks(self.around)))

    def unsettled(self, kind: Callable[[str], bool]) -> list[tuple[str, Origin]]:
        """The rules and places that ask for what isn't known, by name and place in the file. `kind` is about_machine or
        about_storage."""
        rules = self.needs_hardware if kind is about_machine else self.needs_weights
        found = [(self.ruleset.rules[i].id, self.ruleset.rules[i].origin) for i in rules]
        places = [p for p in self.ruleset.places if any(map(kind, p.selector.lacks(self.around)))]
        if self.ruleset.auto is not None and kind is about_machine:
            found.append(("place: auto", self.ruleset.auto.origin))
        return [*found, *((f"place {p.device}", p.origin) for p in places)]

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
        device = self._devices.get(id(decision))  # modules that are decided alike share their decision
        if device is None:
            device = decision.place or self.ruleset.default_device
            if decision.rule is not None:
                device = rule_devices(self.ruleset, self.ruleset.rules[decision.rule], device)[0]
            self._devices[id(decision)] = device
        return device
