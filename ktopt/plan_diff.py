"""What differs between two plans, by rule and by group of modules: the answer of `ktopt diff` and of `ktopt check --locked`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktopt.folding import fold_names
from ktopt.operator import yaml_text
from ktopt.pattern.numbers import from_ranges
from ktopt.plan import Plan, RuleRef, Step
from ktopt.render.style import size

COMPARED = (
    "cls", "operator", "kwargs", "generate_device", "prefill_device", "dtype", "replicas", "inside", "runs", "stored",
    "weight_bytes", "elsewhere",
)  # fmt: skip
"""Fields of a step that count as a difference. Which rule decided, and where it stands in its file, does not."""
SECTIONS = ("long_context", "kvc2")
HOT = "kwargs.hot_experts"
SUMMED = ("weight_bytes", "elsewhere", HOT)
"""Those that are another value for each layer, and told of all layers together."""
DEVICES = ("generate_device", "prefill_device")
PLACE = (*DEVICES, "replicas", "dtype")
"""Those that don't count of a module that holds nothing and that no operator takes: there is nothing to place."""
AUTOMATIC = re.compile(r"rule-\d+")
"""Ids of rules that were given none. They say where a rule stands, not which one it is."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field's value before and after. It prints as "dtype float32 -> bfloat16"."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        show = _show_places if self.name == "elsewhere" else _show
        if self.name == "cls":
            before, after = (text.rpartition(".")[2] for text in (self.before, self.after))
            return f"class {before} -> {after}" if before != after else f"class {self.before} -> {self.after}"
        if self.name == HOT and self.before == self.after:
            return f"hot_experts {self.before} -> as many others"
        return f"{self.name.removeprefix('kwargs.')} {show(self.before)} -> {show(self.after)}"


@dataclass(frozen=True, slots=True)
class Change:
    """Modules that differ alike, in all of these fields; in none where another rule decides the same of them.

    paths    in the order of the tree
    fields   `weight_bytes` is that of all together, each replica counted, and so is `nbytes`, afterwards; `elsewhere` likewise, and
             `hot_experts` is how many these are
    """

    paths: tuple[str, ...]
    fields: tuple[Field, ...]
    nbytes: int

    @property
    def modules(self) -> list[str]:
        """The paths as few patterns: "model.layers.{0..29}.mlp.{gate_proj,up_proj}"."""
        return fold_names(self.paths)

    @property
    def move(self) -> Field | None:
        """The two devices as one, where both change alike."""
        moves = {Field("device", f.before, f.after) for f in self.fields if f.name in DEVICES}
        return moves.pop() if len(moves) == 1 and sum(f.name in DEVICES for f in self.fields) == 2 else None

    def words(self) -> list[str]:
        """Each field in words, a move as one."""
        move = self.move
        told = [move if move and f.name in DEVICES else f for f in self.fields]
        return list(dict.fromkeys(map(str, told)))

    def __str__(self) -> str:
        return f"{', '.join(self.modules)}: {', '.join(self.words())}"


@dataclass(frozen=True, slots=True)
class RuleChanges:
    """What changed of modules that one rule decides in both plans, or one before and another one after.

    before, after     the rules; None where none decides
    same              whether they are one rule in both files: by its id, or by its operator and what it decides
    gone, new         whether `before` is no rule of the other plan, and `after` none of the first
    number            index of `after` in its plan
    """

    before: RuleRef | None
    after: RuleRef | None
    same: bool
    gone: bool
    new: bool
    number: int | None
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class TransferChange:
    """Transfers of one kind that only one plan has: `sign` is "-" for the first, "+" for the second."""

    sign: str
    side: str
    source: str
    target: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.sign} {self.source} -> {self.target} at the {self.side} of {', '.join(fold_names(self.paths))}"


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Differences from plan `a` to plan `b`.

    rules          by rule, the modules that differ; those that another rule decides in the same way too, which is no difference
    only_a, only_b paths of modules that one plan has
    transfers      that one plan has
    settings       of long_context and kvc2
    devices        (device, bytes before, bytes after)
    """

    rules: tuple[RuleChanges, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    transfers: tuple[TransferChange, ...]
    settings: tuple[Field, ...]
    devices: tuple[tuple[str, int, int], ...]

    @property
    def changes(self) -> tuple[Change, ...]:
        """The modules that differ, whichever rule decides them."""
        return tuple(change for rule in self.rules for change in rule.changes if change.fields)

    @property
    def empty(self) -> bool:
        return not (self.changes or self.only_a or self.only_b or self.transfers or self.settings)


@dataclass(slots=True)
class _Entry:
    """A Change that is being gathered: bytes of its modules, and of what is inside of them."""

    deciders: tuple[int | None, int | None]
    fields: tuple[Field, ...]
    paths: list[str] = field(default_factory=list)
    summed: list[Field] = field(default_factory=list)
    before: int = 0
    after: int = 0
    resized: bool = False

    def change(self) -> Change:
        told = [*self.fields]
        hot = [f for f in self.summed if f.name == HOT]
        if hot:
            told.append(Field(HOT, *(sum(_experts(getattr(f, side)) for f in hot) for side in ("before", "after"))))
        elsewhere = [f for f in self.summed if f.name == "elsewhere"]
        if elsewhere:
            told.append(Field("elsewhere", *(_together(getattr(f, side) for f in elsewhere) for side in ("before", "after"))))
        if self.resized:
            told.append(Field("weight_bytes", self.before, self.after))
        return Change(tuple(self.paths), tuple(told), self.after)


def diff_plans(a: Plan, b: Plan) -> PlanDiff:
    """What differs from `a` to `b`. What lies inside a closed module (`recursive: false`) and has no rule counts as part of it."""
    pairs = _same_rules(a, b)
    entries: dict[Any, _Entry] = {}
    of: dict[str, _Entry] = {}
    for step, other, fields in compare_steps(a, b):
        closed = step.inside or other.inside
        entry = of.get(closed) if closed and _taken_by_none(step) and _taken_by_none(other) else None
        if entry is None:
            deciders = _decider(a, step), _decider(b, other)
            if not fields and _is_same(pairs, *deciders):
                continue
            rest, summed = (tuple(f for f in fields if (f.name in SUMMED) is whether) for whether in (False, True))
            places = [(f.name, f.name == "elsewhere" and (*f.before, "->", *f.after)) for f in summed]
            key = (deciders, tuple((f.name, repr(f.before), repr(f.after)) for f in rest), tuple(places))
            entry = of[step.path] = entries.setdefault(key, _Entry(deciders, rest))
            entry.paths.append(step.path)
            entry.summed += summed
        entry.before += _nbytes(step)
        entry.after += _nbytes(other)
        entry.resized |= step.weight_bytes != other.weight_bytes
    totals_a, totals_b = device_bytes(a), device_bytes(b)
    return PlanDiff(
        _by_rule(a, b, pairs, entries.values()),
        tuple(s.path for s in a.steps if s.path not in b.by_path),
        tuple(s.path for s in b.steps if s.path not in a.by_path),
        transfer_changes(a, b),
        tuple(_setting_changes(a, b)),
        tuple((d, totals_a.get(d, 0), totals_b.get(d, 0)) for d in dict.fromkeys((*totals_a, *totals_b))),
    )


def compare_steps(a: Plan, b: Plan) -> Iterator[tuple[Step, Step, tuple[Field, ...]]]:
    """Each module that both plans have, and the fields in which it differs."""
    known: dict[Any, tuple[Field, ...]] = {}
    for step in a.steps:
        other = b.by_path.get(step.path)
        if other is None:
            continue
        if step == other:
            yield step, other, ()
            continue
        key = (*_compared(step), *_compared(other))
        found = known.get(key)
        if found is None:
            found = known[key] = tuple(_differences(step, other))
        yield step, other, found


def _compared(step: Step) -> tuple[Any, ...]:
    """The compared fields as what can be hashed."""
    return (
        step.cls,
        step.operator,
        repr(step.kwargs) if step.kwargs else "",
        step.generate_device,
        step.prefill_device,
        step.dtype,
        step.replicas,
        _inside(step),
        repr(step.runs) if step.runs else "",
        step.stored,
        step.weight_bytes,
        tuple(step.elsewhere.items()),
    )


def _inside(step: Step) -> str:
    """The closed module that a step lies in, by the last part of its path: it is another one for each layer."""
    return step.inside.rpartition(".")[2]


def _differences(a: Step, b: Step) -> Iterator[Field]:
    placed = any(step.weight_bytes or step.operator != "default" for step in (a, b))
    for name in COMPARED:
        if not placed and name in PLACE:
            continue
        before, after = (_inside(step) if name == "inside" else getattr(step, name) for step in (a, b))
        if as_json(before) == as_json(after):
            continue
        if name == "kwargs":
            keys = (
                dict.fromkeys((*a.kwargs, *b.kwargs)) if a.operator == b.operator else [k for k in b.kwargs if k == "generate_op"]
            )
            found = (Field(f"kwargs.{key}", a.kwargs.get(key), b.kwargs.get(key)) for key in keys if not key.endswith("_device"))
            yield from (f for f in found if as_json(f.before) != as_json(f.after))
        else:
            yield Field(name, before, after)


def as_json(value: Any) -> Any:
    """A value as JSON has it, without tuples and integer keys."""
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    return value


def _taken_by_none(step: Step) -> bool:
    return step.rule is None and step.operator == "default"


def _nbytes(step: Step) -> int:
    return step.weight_bytes * (1 + len(step.replicas))


def _decider(plan: Plan, step: Step) -> int | None:
    """The rule that decides a module: that of the closed module above, for those inside one."""
    closed = plan.by_path.get(step.inside) if step.inside else step
    return None if closed is None else closed.rule


def _same_rules(a: Plan, b: Plan) -> dict[int, int]:
    """Which rule of `a` is which of `b`, by number: by id; else the one of its operator that decides the most of the same modules;
    else by operator and line."""
    named = {rule.id: number for number, rule in enumerate(b.rules) if not AUTOMATIC.fullmatch(rule.id)}
    pairs = {number: named[rule.id] for number, rule in enumerate(a.rules) if rule.id in named}
    taken = set(pairs.values())
    shared: Counter[tuple[int | None, int | None]] = Counter()
    for step in a.steps:
        other = b.by_path.get(step.path)
        if other is not None:
            shared[_decider(a, step), _decider(b, other)] += 1
    likely = [(x, y) for (x, y), _ in shared.most_common() if x is not None and y is not None]
    at = {(rule.operator, rule.line): number for number, rule in enumerate(b.rules)}
    lines = [(x, at[key]) for x, rule in enumerate(a.rules) if (key := (rule.operator, rule.line)) in at]
    for x, y in (*likely, *lines):
        if x not in pairs and y not in taken and a.rules[x].operator == b.rules[y].operator:
            pairs[x] = y
            taken.add(y)
    return pairs


def _is_same(pairs: Mapping[int, int], before: int | None, after: int | None) -> bool:
    if before is None or after is None:
        return before is after
    return pairs.get(before) == after


def _by_rule(a: Plan, b: Plan, pairs: Mapping[int, int], entries: Iterable[_Entry]) -> tuple[RuleChanges, ...]:
    """Rules that both plans have, in the second one's order; modules that no rule decides; and those that changed rule."""
    found: dict[tuple[int | None, int | None], list[Change]] = {}
    for entry in entries:
        found.setdefault(entry.deciders, []).append(entry.change())

    def order(deciders: tuple[int | None, int | None]) -> tuple[bool, Sequence[int]]:
        before, after = (len(plan.rules) if n is None else n for plan, n in zip((a, b), deciders, strict=True))
        return not _is_same(pairs, *deciders), (after, before)

    kept = set(pairs.values())
    return tuple(
        RuleChanges(
            None if before is None else a.rules[before],
            None if after is None else b.rules[after],
            _is_same(pairs, before, after),
            before is not None and before not in pairs,
            after is not None and after not in kept,
            after,
            tuple(found[before, after]),
        )
        for before, after in sorted(found, key=order)
    )


def transfer_changes(a: Plan, b: Plan) -> tuple[TransferChange, ...]:
    """Transfers that only one plan has, by kind."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for sign, plan, other in (("-", a, b), ("+", b, a)):
        there = set(other.transfers)
        for t in plan.transfers:
            if t not in there:
                found.setdefault((sign, t.side, t.source, t.target), []).append(t.path)
    return tuple(TransferChange(*kind, tuple(paths)) for kind, paths in found.items())


def _setting_changes(a: Plan, b: Plan) -> Iterator[Field]:
    for section in SECTIONS:
        before, after = getattr(a, section), getattr(b, section)
        for name in dict.fromkeys((*before, *after)):
            if before.get(name) != after.get(name):
                yield Field(f"{section}.{name}", before.get(name), after.get(name))


def device_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of weights on each device that holds any."""
    totals: dict[str, int] = {}
    for step in plan.steps:
        for device, count in step.held_bytes.items():
            totals[device] = totals.get(device, 0) + count
    return {device: count for device, count in totals.items() if count}


def _experts(hot: Any) -> int:
    """How many experts `hot_experts` names: text such as "0..15", or text by layer."""
    texts = hot.values() if isinstance(hot, Mapping) else [] if hot is None else [hot]
    try:
        return sum(len(from_ranges(str(text))) for text in texts)
    except ValueError:  # of a lock file, which is compared unchecked
        return 0


def _together(places: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in places:
        total.update(each)
    return dict(total)


def _show_places(places: Mapping[str, int]) -> str:
    return " and ".join(f"{size(count)} on {device}" for device, count in places.items()) or "none"


def _show(value: Any) -> str:
    return "none" if value in (None, "", (), {}) else yaml_text(value)
