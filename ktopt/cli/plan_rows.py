"""What `ktopt plan` shows of a plan, as a tree of rows: names that are treated alike share one, a holder of one module is named
with it, and layers like earlier ones are told by these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktopt.folded import Group, treatment
from ktopt.plan import Step

COMPARED = 16
"""How many earlier siblings another one is compared with."""
STRETCHES = 8
"""So many stretches of numbers are told; of more the first ones, and the last."""
FEW = 3
"""A subtree of fewer rows is shown whole, whatever it is like."""


@dataclass(frozen=True, slots=True)
class Row:
    """Modules in one row.

    name      what follows the path of the row above: "layers.{0..29}", "{gate_proj,up_proj}"
    step      one of them; where `holder`, its modules have no weights, rule or operator: they only hold others
    nbytes    with all below
    devices   where they are; of a holder, where all below is, if that is one place
    rules     numbers of the rules that decide them
    like      the sibling that all below is like, apart from devices, rules and the rows below: "{0..14}"; or ""
    key       equal for rows that may be joined
    """

    name: str
    count: int
    step: Step
    nbytes: int
    holder: bool
    devices: tuple[str, ...]
    rules: tuple[int, ...]
    key: Any
    rows: tuple[Row, ...] = ()
    like: str = ""

    def walk(self) -> Iterator[Row]:
        """Itself and all rows below, in the order in which they are shown."""
        yield self
        for row in self.rows:
            yield from row.walk()


def rows_of(group: Group, everything: bool = False) -> Row:
    """The rows of a folded plan. With `everything` each holder has a row of its own."""
    below = _joined(_siblings(group.children, everything))
    step, holder = group.step, _is_holder(group) and bool(below)
    name = _name(group, everything)
    if holder and len(below) == 1 and group.name and not everything:
        return replace(below[0], name=f"{name}.{below[0].name}")
    at, rules = _at(group), _rules(group)
    if not holder:
        at, rules = tuple(step.held_bytes), () if step.rule is None else (step.rule,)
    at = () if holder and len(at) > 1 else at
    return Row(name, group.count, step, group.nbytes, holder, at, rules, treatment(step), tuple(below))


def _name(group: Group, everything: bool) -> str:
    """The group's name; of many stretches of numbers "{1,3,5,7,...,29}" unless everything is asked for."""
    stretches = group.name.strip("{}").split(",")
    if everything or len(stretches) <= STRETCHES:
        return group.name
    return f"{{{','.join(stretches[: STRETCHES - 4])},...,{stretches[-1]}}}"


def _is_holder(group: Group) -> bool:
    return not group.own_nbytes and group.step.rule is None and group.step.operator == "default"


def _at(group: Group) -> tuple[str, ...]:
    """The devices of a group and of all below it."""
    return tuple(dict.fromkeys(d for g in group.walk() if not _is_holder(g) for d in g.step.held_bytes))


def _rules(group: Group) -> tuple[int, ...]:
    return tuple(sorted({g.step.rule for g in group.walk() if g.step.rule is not None}))


def _siblings(groups: Iterable[Group], everything: bool) -> list[Row]:
    """A row for each group, in which numbered ones that are like an earlier one are told by it."""
    rows: list[Row] = []
    before: list[Group] = []
    for group in groups:
        row = rows_of(group, everything)
        if group.step.path.rpartition(".")[2].isdecimal():
            found = _likest(group, before) if sum(1 for _ in row.walk()) >= FEW else None
            if found is not None:
                row = _told(group, row, *found)
            before.append(group)
        rows.append(row)
    return rows


def _likest(group: Group, others: Sequence[Group]) -> tuple[Group, list[Group]] | None:
    """The group that it is most like, and what of it differs all the same: less than half."""
    found = [(other, different) for other in others[:COMPARED] if (different := _different(other, group)) is not None]
    best = min(found, key=lambda pair: len(pair[1]), default=None)
    if best is None or 2 * len(best[1]) >= sum(not _is_holder(g) for g in group.walk()):
        return None
    return best


def _told(group: Group, row: Row, like: Group, different: Sequence[Group]) -> Row:
    """The row of a group by another one, with rows for what differs."""
    rules = () if _rules(group) == _rules(like) else _rules(group)
    below = _joined([replace(rows_of(g), name=g.pattern[len(group.pattern) + 1 :] or "(itself)", rows=()) for g in different])
    return replace(row, holder=True, devices=_at(group), rules=rules, rows=tuple(below), like=_name(like, False))


def _different(like: Group, other: Group) -> list[Group] | None:
    """The groups below `other` that are not treated as those below `like`, devices of the one standing for the other's; None where
    they hold different modules."""
    pairs = _pairs(like, other)
    if pairs is None:
        return None
    held = [(a, b) for a, b in pairs if not _is_holder(b)]
    moves = Counter((a.step.generate_device, b.step.generate_device) for a, b in held)
    device = {before: after for (before, after), _ in reversed(moves.most_common())}
    return [b for a, b in held if not _same(a.step, b.step, device)]


def _pairs(a: Group, b: Group) -> list[tuple[Group, Group]] | None:
    """Groups of one place in both, with those below; None where a module is in one alone."""
    if [g.name for g in a.children] != [g.name for g in b.children] or _is_holder(a) != _is_holder(b):
        return None
    pairs = [(a, b)]
    for below in map(_pairs, a.children, b.children):
        if below is None:
            return None
        pairs += below
    return pairs


def _same(a: Step, b: Step, device: dict[str, str]) -> bool:
    at_a, rest_a = _parted(a)
    at_b, rest_b = _parted(b)
    return rest_a == rest_b and [device.get(d, d) for d in at_a] == at_b


def _parted(step: Step) -> tuple[list[str], Any]:
    """The devices that a step names, and all else that its treatment is. One rule is as good as another."""
    named = {name: str(value) for name, value in step.kwargs.items() if name.endswith("device")}
    plain = step._replace(
        kwargs={name: value for name, value in step.kwargs.items() if name not in named},
        generate_device="",
        prefill_device="",
        replicas=(),
        rule=None if step.rule is None else 0,
    )
    return [step.generate_device, step.prefill_device, *step.replicas, *named.values()], (treatment(plain), tuple(named))


def _joined(rows: Sequence[Row]) -> list[Row]:
    """Rows that are alike but for the last part of their names as one: "mlp.{gate_proj,up_proj}". Those with rows below them stand
    alone, and keep others apart."""
    alike: dict[Any, list[Row]] = {}
    between = 0
    for row in rows:
        between += bool(row.rows)
        before, _, last = row.name.rpartition(".")
        single = bool(row.rows) or last.endswith("}") or last.isdecimal()
        alike.setdefault(row.name if single else (between, before, row.count, row.like, row.key), []).append(row)
    return [_join(group) for group in alike.values()]


def _join(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    before, dot, _ = rows[0].name.rpartition(".")
    name = f"{before}{dot}{{{','.join(row.name.rpartition('.')[2] for row in rows)}}}"
    return replace(rows[0], name=name, count=sum(row.count for row in rows), nbytes=sum(row.nbytes for row in rows))
