"""What differs between two plans, by module group: the answer of `ktopt diff` and of `ktopt check --locked`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ktopt.folding import fold_paths
from ktopt.operator import yaml_text
from ktopt.plan import Plan, Step

COMPARED = (
    "cls", "operator", "kwargs", "prefill_device", "generate_device", "dtype", "replicas", "inside", "runs", "weight_bytes",
    "stored",
)  # fmt: skip
"""Fields of a step that count as a difference. Which rule decided, and where it stands in its file, does not."""
SECTIONS = ("long_context", "kvc2")
PLACE = ("prefill_device", "generate_device", "replicas")
"""Those that don't count of a module that holds nothing and that no operator takes: there is nothing to place."""


@dataclass(frozen=True, slots=True)
class Change:
    """One field of modules that differ alike. `paths` in tree order."""

    field: str
    before: Any
    after: Any
    paths: tuple[str, ...]

    def lines(self, paths: Iterable[str] | None = None) -> list[str]:
        """The change in words, a line for each group of paths that fold to one; of all its modules, or of these."""
        groups = fold(self.paths if paths is None else paths)
        return [f"{group}: {self.field} {_show(self.before)} -> {_show(self.after)}" for group in groups]


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Differences from plan `a` to plan `b`: modules that only one has, fields that differ, transfers, the bytes per device, and
    settings of long_context and kvc2."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changes: tuple[Change, ...]
    transfers: tuple[str, ...]
    devices: tuple[tuple[str, int, int], ...]
    settings: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.only_a or self.only_b or self.changes or self.transfers or self.settings)

    def render(self) -> str:
        """The difference as lines for a terminal; "" when there is none."""
        lines = [f"- {group}" for group in fold(self.only_a)] + [f"+ {group}" for group in fold(self.only_b)]
        lines += [f"~ {line}" for change in self.changes for line in change.lines()]
        lines.extend(self.transfers)
        lines.extend(self.settings)
        if lines:
            lines.extend(f"  {device}: {a / 1e6:,.1f} MB -> {b / 1e6:,.1f} MB" for device, a, b in self.devices if a != b)
        return "\n".join(lines)


def diff_plans(a: Plan, b: Plan) -> PlanDiff:
    """What differs from `a` to `b`."""
    changed: dict[tuple[str, str, str], tuple[Any, Any, list[str]]] = {}
    for step in a.steps:
        other = b.by_path.get(step.path)
        if other is not None:
            for name, before, after in _differences(step, other):
                entry = changed.setdefault((name, repr(before), repr(after)), (before, after, []))
                entry[2].append(step.path)
    changes = tuple(Change(name, before, after, tuple(paths)) for (name, _, _), (before, after, paths) in changed.items())
    totals_a, totals_b = device_bytes(a), device_bytes(b)
    return PlanDiff(
        tuple(s.path for s in a.steps if s.path not in b.by_path),
        tuple(s.path for s in b.steps if s.path not in a.by_path),
        changes,
        _transfer_lines(a, b),
        tuple((d, totals_a.get(d, 0), totals_b.get(d, 0)) for d in dict.fromkeys((*totals_a, *totals_b))),
        tuple(_setting_lines(a, b)),
    )


def _differences(a: Step, b: Step) -> Iterable[tuple[str, Any, Any]]:
    placed = any(step.weight_bytes or step.operator != "default" for step in (a, b))
    for name in COMPARED:
        if not placed and name in PLACE:
            continue
        before, after = getattr(a, name), getattr(b, name)
        if _comparable(before) == _comparable(after):
            continue
        if name == "kwargs" and a.operator == b.operator:
            keys = [k for k in dict.fromkeys((*before, *after)) if _comparable(before.get(k)) != _comparable(after.get(k))]
            yield from ((f"kwargs.{k}", before.get(k), after.get(k)) for k in keys if not k.endswith("_device"))
        elif name != "kwargs":
            yield name, before, after


def _comparable(value: Any) -> Any:
    """JSON has no tuples and no integer keys: compare as it would."""
    if isinstance(value, Mapping):
        return {str(k): _comparable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(v) for v in value]
    return value


def _transfer_lines(a: Plan, b: Plan) -> tuple[str, ...]:
    def lines(plan: Plan, other: Plan, sign: str) -> list[str]:
        gone = set(plan.transfers) - set(other.transfers)
        return [f"{sign} transfer at the {t.side} of {t.path}: {t.source} to {t.target}" for t in plan.transfers if t in gone]

    return (*lines(a, b, "-"), *lines(b, a, "+"))


def _setting_lines(a: Plan, b: Plan) -> Iterable[str]:
    for section in SECTIONS:
        before, after = getattr(a, section), getattr(b, section)
        for name in dict.fromkeys((*before, *after)):
            if before.get(name) != after.get(name):
                yield f"~ {section}.{name} {_show(before.get(name))} -> {_show(after.get(name))}"


def device_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of weights on each device that holds any."""
    totals: dict[str, int] = {}
    for step in plan.steps:
        for device in (step.generate_device, *step.replicas):
            totals[device] = totals.get(device, 0) + step.weight_bytes
    return {device: count for device, count in totals.items() if count}


def fold(paths: Iterable[str]) -> list[str]:
    """Paths with their numbers folded into ranges: "model.layers.{0..2,5}.mlp" for four of them."""
    return [pattern.text or "(the model)" for pattern in fold_paths(paths)]


def _show(value: Any) -> str:
    return "none" if value in (None, "", (), {}) else yaml_text(value)
