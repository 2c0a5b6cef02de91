"""The plan: every module of a model, its operator, devices, dtype and bytes, and the rule that decided it.

A plan is frozen, deterministic data: it prints, is written as JSON, read back and compared. `apply` reads a plan and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

FORMAT = 1
"""Version of the JSON form."""


class Step(NamedTuple):
    """One module's row. A named tuple, since a plan may have 75,000 of them; change one with `step._replace(...)`.

    path, cls, role     the module; `cls` is its dotted class
    operator            operator name; "default" leaves the module as it is, only placed
    kwargs              the operator's full config, defaults filled in
    prefill_device, generate_device   canonical device names; weights live on the generate device
    dtype               torch's name of the dtype that its floating-point weights are held in
    weight_bytes        bytes of its own tensors (not its children's) at rest
    rule                index into Plan.rules, or None where no rule matched
    alias               the older path by which the rule named it, or ""
    replicas            further devices that hold a copy (a rotary embedding that upstream had once per layer)
    inside              path of the ancestor whose rule has `recursive: false` and so owns this module, or ""
    runs                op asked for -> op that runs in its place here (by --remap or for want of a kernel), each with a reason
    notes               what the plan has to say of this module
    stored              storage types that its matrices stay in, where its op computes on them as the weight file has them; () where
                        they are held in `dtype`, or where no weights were given to tell
    elsewhere           of weight_bytes, what lives on other devices, by device (hot experts)
    """

    path: str
    cls: str
    role: str
    operator: str
    kwargs: Mapping[str, Any]
    prefill_device: str
    generate_device: str
    dtype: str
    weight_bytes: int
    rule: int | None = None
    alias: str = ""
    replicas: tuple[str, ...] = ()
    inside: str = ""
    runs: Mapping[str, tuple[str, str]] = MappingProxyType({})
    notes: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    elsewhere: Mapping[str, int] = MappingProxyType({})

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes of its own tensors on each device that it is on, copies included."""
        if not self.elsewhere and not self.replicas:
            return {self.generate_device: self.weight_bytes}
        held = {self.generate_device: self.weight_bytes - sum(self.elsewhere.values())}
        for device, count in (*self.elsewhere.items(), *((replica, self.weight_bytes) for replica in self.replicas)):
            held[device] = held.get(device, 0) + count
        return held


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tensors move to `target` where they enter (`side` "input") or leave (`side` "output") the module `path`.

    source is the device that they come from; `after` is the module that produced them.
    """

    path: str
    side: str
    source: str
    target: str
    after: str = ""


@dataclass(frozen=True, slots=True)
class RuleRef:
    """A rule as the plan remembers it."""

    id: str
    file: str
    line: int
    column: int
    operator: str
    active: bool = True


@dataclass(frozen=True, slots=True)
class ModelRef:
    """The model that a plan was made for.

    source      what the user gave: a shipped name or a path
    tree        ModuleGraph.digest
    config      the model's config.json, so that the tree can be rebuilt
    config_digest   sha256 of the config, by which one that was changed later is noticed; "" has it computed
    """

    source: str
    model_type: str
    architectures: tuple[str, ...]
    tree: str
    config: Mapping[str, Any]
    config_digest: str = ""

    def __post_init__(self) -> None:
        if not self.config_digest:
            object.__setattr__(self, "config_digest", digest_of(self.config))


def digest_of(config: Mapping[str, Any]) -> str:
    """sha256 of a config as JSON with sorted keys: the same before it is written and after it is read."""
    return hashlib.sha256(json.dumps(_with_text_keys(config), sort_keys=True, default=str).encode()).hexdigest()


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Plan:
    """Every stage's result, complete before a module is touched. `long_context` and `kvc2` are what the rule file's sections of
    these names say, by the fields' names (config.py), and nothing that they leave out."""

    model: ModelRef
    rule_file: str
    rule_digest: str
    rules: tuple[RuleRef, ...]
    steps: tuple[Step, ...]
    transfers: tuple[Transfer, ...]
    default_device: str
    dtype: str
    hardware: str = ""
    remap: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ktopt_version: str = ""
    transformers_version: str = ""
    long_context: Mapping[str, Any] = field(default_factory=dict)
    kvc2: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Plan:
        """Itself: nothing in a plan changes. A model that is copied keeps its plan."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which can't write read-only mappings: with plain ones."""
        steps = tuple(
            step._replace(kwargs=dict(step.kwargs), runs=dict(step.runs), elsewhere=dict(step.elsewhere)) for step in self.steps
        )
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: dict(values[name]) for name in ("remap", "long_context", "kvc2")} | {"steps": steps}
        return type(self), tuple(values.values())

    @cached_property
    def by_path(self) -> dict[str, Step]:
        return {step.path: step for step in self.steps}

    @cached_property
    def _places(self) -> dict[str, int]:
        return {step.path: place for place, step in enumerate(self.steps)}

    def below(self, path: str) -> tuple[Step, ...]:
        """The rows of the modules below one, in order."""
        first = end = self._places[path] + 1
        while end < len(self.steps) and self.steps[end].path.startswith(f"{path}." if path else ""):
            end += 1
        return self.steps[first:end]

    def blame(self, step: Step) -> str:
        """The rule behind a step, as file:line, or the plan's default."""
        if step.rule is None:
            return "no rule (the default)"
        rule = self.rules[step.rule]
        return f"{rule.file}:{rule.line} (rule {rule.id})"

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that holds tensors or runs an operator, in order of first use. Containers only pass data on."""
        seen: dict[str, None] = {}
        for step in self.steps:
            if not step.weight_bytes and step.operator == "default":
                continue
            for device in step.held_bytes:
                seen.setdefault(device)
        return tuple(seen)

    @property
    def weight_bytes(self) -> int:
        return sum(step.weight_bytes * (1 + len(step.replicas)) for step in self.steps)
