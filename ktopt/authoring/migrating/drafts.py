"""Rules of the list form as drafts of native rules: what each takes, where its modules live, and which rules say the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

from ktopt.authoring.migrating.remarks import Remarks
from ktopt.authoring.migrating.selectors import Choice, choose
from ktopt.authoring.migrating.trees import Tree
from ktopt.match import Matches
from ktopt.placement import device_kind
from ktopt.ruleset import NameClass, Rule, RuleSet, rule_devices
from ktopt.treeindex import index_of, members

DEVICES = ("generate_device", "prefill_device", "device")


@dataclass(eq=False)
class Old:
    """One rule of the old file.

    choice    what it takes, as a selector; None where only its own name and class say it
    takes     the places that it takes, and `wins` those that it decides, in each model
    generate, prefill   its devices
    remarks   what its author says of it
    """

    rule: Rule
    match: NameClass
    choice: Choice | None
    takes: list[int]
    wins: list[int]
    generate: str
    prefill: str
    remarks: Remarks

    @property
    def index(self) -> int:
        return self.rule.index

    @property
    def only_places(self) -> bool:
        """Whether it keeps the modules and says no more than where they are."""
        return self.rule.replace.operator.name == "default" and self.rule.recursive and self.generate == self.prefill

    @property
    def home(self) -> str:
        """The device that its modules' inputs are on: experts on the CPU are called from a GPU."""
        beside = device_kind(self.generate) == "cpu" and device_kind(self.prefill) != "cpu"
        return self.prefill if beside else self.generate

    def kwargs(self, places: Sequence[str | None], default: str) -> dict[str, Any]:
        """The kwargs that a native file has to give where the modules are placed so (None: by no line, on the default device): all
        but those that say the same as the place or the operator's default."""
        config, given = self.rule.replace.config, self.rule.replace.given
        names = {f.name for f in fields(config)}
        kept: dict[str, Any] = {}
        if {place or default for place in places} != {self.generate}:
            kept["generate_device"] = self.generate
        beside = self.rule.replace.operator.name != "default"
        if {(beside and place) or self.generate for place in places} != {self.prefill}:
            kept["prefill_device"] = self.prefill
        for f in fields(config):
            value, is_device = getattr(config, f.name), f.metadata.get("device")
            if f.name not in given and is_device and not f.metadata.get("ignored") and f.name not in (*DEVICES, "hot_device"):
                kept |= {f.name: None} if any(place not in (None, self.generate) for place in places) else {}
            if f.name not in given or f.name in (*DEVICES, "transfer_map"):
                continue
            remarked = bool(self.remarks.options & {f.name, *f.metadata.get("aliases", ())})
            is_default = value == f.default and not f.metadata.get("op") and not remarked
            if not (set(places) == {value} if is_device else is_default):
                kept[f.name] = value
        return {key: value for key, value in kept.items() if key in names}


@dataclass(eq=False)
class Draft:
    """A native rule in the making: the old rules that it stands for, in order. `literal` keeps their name and class."""

    olds: list[Old]
    kwargs: dict[str, Any]
    literal: bool = False
    id: str = ""
    remarks: Remarks = field(default_factory=Remarks)

    @property
    def choice(self) -> Choice | None:
        """What they take together; None where it has to be said by name and class."""
        choices = [old.choice for old in self.olds if old.choice is not None]
        if self.literal or len(choices) < len(self.olds):
            return None
        return reduce(Choice.joined, choices)

    @property
    def first(self) -> Old:
        return self.olds[0]


def read_old(ruleset: RuleSet, remarks: Sequence[Remarks], trees: Sequence[Tree], matches: Sequence[Matches]) -> list[Old]:
    """The file's rules, each with what it takes and decides in each model."""
    olds = []
    for rule in ruleset.rules:
        assert isinstance(rule.match, NameClass)
        takes = [tree.takes(rule.match) for tree in trees]
        generate, prefill = rule_devices(ruleset, rule, ruleset.default_device)
        choice = choose(rule.match, trees) if any(takes) else None
        olds.append(Old(rule, rule.match, choice, takes, [0] * len(trees), generate, prefill, remarks[rule.index]))
    for number, found in enumerate(matches):
        for rule_index, places in _winners(found, olds, number).items():
            olds[rule_index].wins[number] = places
    return olds


def _winners(matches: Matches, olds: Sequence[Old], number: int) -> dict[int, int]:
    """The places that each rule decides: a module's own path, or those of its older paths that rules decide it by."""
    index = index_of(matches.graph)
    found: dict[int, int] = {}
    for module, decision in matches.open:
        if decision.rule is None:
            continue
        if not decision.alias_rules:
            found[decision.rule] = found.get(decision.rule, 0) | 1 << module.index
            continue
        first = index.first_alias_place[module.index]
        for place in range(first, first + len(module.alias_paths)):
            rule = next((i for i in decision.alias_rules if olds[i].takes[number] >> place & 1), None)
            if rule is not None:
                found[rule] = found.get(rule, 0) | 1 << place
    return found


def group(
    olds: Iterable[Old],
    homes: Sequence[Mapping[int, str]],
    default: str,
    apart: Collection[int],
    literal: Collection[int],
    *,
    together: bool = False,
) -> list[Draft]:
    """Rules that say the same of different modules as one, at the place of the first.

    homes    where each place of each model is by the file's `place:`
    apart    rules that stay on their own; those of `literal` keep their name, class and devices too
    together   whether those that are apart may become one with each other
    """
    groups: dict[Any, Draft] = {}
    drafts: list[Draft] = []
    for old in olds:
        if old.index in literal:
            drafts.append(Draft([old], old.kwargs((), default), literal=True))
            continue
        places = [home.get(at) for wins, home in zip(old.wins, homes, strict=True) for at in members(wins)]
        kwargs = old.kwargs(places, default)
        replace, choice = old.rule.replace, old.choice
        key: Any = (replace.operator.name, repr(sorted(kwargs.items())), old.rule.recursive, choice and choice.cls)
        if choice is None or not choice.parts or (old.index in apart and not together):
            key = old.index
        elif old.index in apart:
            key = ("apart", key)
        if key not in groups:
            groups[key] = Draft([], kwargs)
            drafts.append(groups[key])
        groups[key].olds.append(old)
    return drafts
