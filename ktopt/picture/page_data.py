"""A plan as the data of its HTML page: the folded tree with every module that it stands for, in as many values as it has kinds of
module. 75,000 modules of which each expert is one take some kilobytes.

    facts  what is to be said of modules, each once
    tree   the root's node: {n: name, k: numbers where it stands for several of one parent, f: number of its facts, b: bytes of its
           own tensors, s: nodes below, a: older path by which the rule took it, o: notes}; b, a and o are {each: [...]} where the
           modules differ in them, in the order of the tree. "#" in an older path stands for the next number of the module's own.
           v: it is no module, but so many slices of the module above it. h: the hot ones of them, {each: [...]} where the modules
           above differ

Numbers of a parent's member i stand at i*len(k) and the following.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ktopt.folded import Group, fold_plan
from ktopt.graph import Module
from ktopt.pattern.numbers import from_ranges
from ktopt.picture.picture import BESIDE, KINDS, Picture
from ktopt.plan import Plan, Step

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def page_data(picture: Picture) -> dict[str, Any]:
    """The data, as plain JSON values."""
    plan, kinds = picture.plan, [*KINDS, *BESIDE]
    writer = _Writer(picture)
    tree = writer.node(fold_plan(plan, everything=True), 1)
    return {
        "model": plan.model.source,
        "model_type": plan.model.model_type,
        "rule_file": plan.rule_file,
        "hardware": plan.hardware,
        "dtype": plan.dtype,
        "made_by": {"ktopt": plan.ktopt_version, "transformers": plan.transformers_version},
        "errors": list(plan.errors),
        "notes": list(plan.notes),
        "kinds": kinds,
        "context": picture.context,
        "weights": sum(d.weight_bytes for d in picture.devices),
        "devices": [
            {"name": d.name, "model": d.model, "memory": d.memory_bytes, "bytes": [d.nbytes.get(kind, 0) for kind in kinds]}
            for d in picture.devices
        ],
        "rules": [{"id": r.id, "file": r.file, "line": r.line, "active": r.active} for r in plan.rules],
        "facts": writer.facts,
        "tree": tree,
        "transfers": [
            {
                "source": e.source.pattern, "target": e.target.pattern,
                "path": (e.target if e.side == "input" else e.source).paths[0],
                "from": e.from_device, "to": e.to_device, "side": e.side, "count": e.count, "bytes": e.nbytes, "what": e.what,
                "own": e.by_operator,
            }
            for e in picture.edges
        ],
        "transfer_bytes": picture.transfer_bytes,
    }  # fmt: skip


class _Writer:
    def __init__(self, picture: Picture) -> None:
        self.plan: Plan = picture.plan
        self.modules: dict[str, Module] = picture.tree.by_path if picture.tree is not None else {}
        self.facts: list[dict[str, Any]] = []
        self.known: dict[str, int] = {}

    def node(self, group: Group, parents: int) -> dict[str, Any]:
        """The node of a group, of which `parents` modules have members."""
        steps = [self.plan.by_path.get(path, group.step) for path in group.paths]
        made: dict[str, Any] = {
            "n": group.name,
            "f": self.number(_facts(group.step)),
            "b": _one_or_all([_own_bytes(s) for s in steps]),
        }
        if (many := group.count // parents) > 1:
            made["k"] = [int(path.rpartition(".")[2]) for path in group.paths[:many]]
        for key, values in (("a", [_template(s) for s in steps]), ("o", [list(s.notes) for s in steps])):
            if any(values):
                made[key] = _one_or_all(values)
        if group.step.elsewhere:
            made["h"] = _one_or_all([_hot(s) for s in steps])
        below = [*(self.node(child, group.count) for child in group.children), *self.slices(group, steps)]
        return {**made, "s": below} if below else made

    def slices(self, group: Group, steps: Sequence[Step]) -> list[dict[str, Any]]:
        """Experts that are slices of one module's tensors, as if each were a module."""
        module = self.modules.get(group.paths[0])
        experts = _experts_in(module) if module is not None and group.step.role == "experts" else 0
        if experts < 2:
            return []
        facts = {**_facts(group.step), "role": "expert", "cls": f"one of the {experts} of {group.step.cls.rpartition('.')[2]}"}
        each = _one_or_all([count for step in steps for count in _slice_bytes(step, experts)])
        made = {"n": "", "k": list(range(experts)), "f": self.number(facts), "b": each, "v": 1}
        return [{**made, "h": _one_or_all([_hot(s) for s in steps])} if group.step.elsewhere else made]

    def number(self, facts: dict[str, Any]) -> int:
        key = json.dumps(facts, sort_keys=True)
        if key not in self.known:
            self.known[key] = len(self.facts)
            self.facts.append(facts)
        return self.known[key]


def _own_bytes(step: Step) -> int:
    return step.weight_bytes * (1 + len(step.replicas))


def _hot(step: Step) -> list[int]:
    """The numbers of a layer's hot experts: its row names those of its own layer."""
    hot = step.kwargs.get("hot_experts")
    text = next(iter(hot.values()), "") if isinstance(hot, Mapping) else hot or ""
    return list(from_ranges(str(text)))


def _slice_bytes(step: Step, experts: int) -> list[int]:
    """Bytes of each expert of a layer, about: those on one device share its bytes alike."""
    hot, there = set(_hot(step)) if step.elsewhere else set(), sum(step.elsewhere.values())
    cold = (step.weight_bytes - there) // max(1, experts - len(hot))
    return [there // len(hot) if number in hot else cold for number in range(experts)]


def _facts(step: Step) -> dict[str, Any]:
    """What is to be said of a module but for its path, bytes, older name and notes; without what is empty."""
    found = {
        "cls": step.cls,
        "role": step.role,
        "op": step.operator,
        "kw": _plain({key: value for key, value in step.kwargs.items() if key != "hot_experts"}),
        "dev": step.generate_device,
        "pre": step.prefill_device,
        "dt": step.dtype,
        "rule": step.rule,
        "rep": list(step.replicas),
        "else": list(step.elsewhere),
        "runs": {asked: list(runs) for asked, runs in step.runs.items()},
        "st": list(step.stored),
        "in": step.path[len(step.inside) :].count(".") if step.inside else None,
    }
    return {key: value for key, value in found.items() if value not in (None, "", [], {})}


def _plain(value: Any) -> Any:
    """A value as JSON in a browser has it: no NaN, and no type of its own."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    known = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def _template(step: Step) -> str:
    """A module's older path, its numbers as "#" where they are the first ones of the module's own."""
    if not step.alias:
        return ""
    own = _NUMBER.findall(step.path)
    mine = _NUMBER.findall(step.alias)
    return _NUMBER.sub("#", step.alias) if mine == own[: len(mine)] and "#" not in step.alias else step.alias


def _one_or_all(values: Sequence[Any]) -> Any:
    """The value where all are equal, else each one's."""
    return values[0] if all(value == values[0] for value in values) else {"each": list(values)}


def _experts_in(module: Module) -> int:
    counts = {t.shape[0] for t in module.parameters if len(t.shape) == 3}
    return counts.pop() if len(counts) == 1 and all(len(t.shape) > 1 for t in module.parameters) else 0
