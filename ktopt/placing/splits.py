"""Layers' experts one by one, for the placing of those that are chosen most: what a rule set says of hot experts, taken out of it
and put into it, and what experts take on each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktopt.diagnostics import KtoptError
from ktopt.graph import Module
from ktopt.match import Matches
from ktopt.operator import OperatorConfig, OperatorSpec, op_on
from ktopt.pattern.numbers import as_ranges
from ktopt.placement import Device, Speed
from ktopt.placing.problem import CPU, INFINITE, Split
from ktopt.placing.speeds import read_us
from ktopt.plan import Plan, Step
from ktopt.popularity import experts_in
from ktopt.registry import find
from ktopt.ruleset import RuleSet

Hot = Mapping[int, Mapping[int, Sequence[int]]]
"""By a rule's index and a layer's number, the experts that are hot."""


@dataclass(frozen=True)
class Chosen:
    """A layer's experts, the most chosen first, and the rule that made their operator."""

    module: Module
    rule: int
    order: tuple[int, ...]


def without_hot(ruleset: RuleSet) -> RuleSet:
    """A rule set whose experts are whole."""
    if not any(getattr(rule.replace.config, "hot_experts", None) for rule in ruleset.rules):
        return ruleset
    return with_hot(ruleset, {rule.index: {} for rule in ruleset.rules})


def with_hot(ruleset: RuleSet, hot: Hot) -> RuleSet:
    """A rule set whose rules split experts so; rules that `hot` leaves out stay as they are."""
    rules = []
    for rule in ruleset.rules:
        config: Any = rule.replace.config
        if rule.index in hot and hasattr(config, "hot_experts"):
            layers: dict[int, int | str] = {layer: as_ranges(ids) for layer, ids in hot[rule.index].items()}
            given = {name: value for name, value in rule.replace.given.items() if name != "hot_experts"}
            given |= {"hot_experts": layers} if layers else {}
            made = replace(rule.replace, config=replace(config, hot_experts=layers or None), given=given)
            rule = replace(rule, replace=made)
        rules.append(rule)
    return replace(ruleset, rules=tuple(rules))


def splitting_rule(matches: Matches, module: Module) -> int:
    """The rule that makes a layer's experts an operator that can split them. KtoptError where none does."""
    decision = matches.decisions[module.index]
    rule = None if decision.rule is None else matches.ruleset.rules[decision.rule]
    if rule is None or decision.closed_by is not None or not hasattr(rule.replace.config, "hot_experts"):
        become = "stay as they are" if rule is None else f"become {rule.replace.operator.name}"
        raise KtoptError(
            f"{module.path} can't be split by popularity: its experts {become}. Give it a rule such as\n"
            f'  - {{match: "@{_every_layer(module)}", replace: KTransformersExperts}}'
        )
    return rule.index


def _every_layer(module: Module) -> str:
    return ".".join("*" if part == str(module.layer) else part for part in module.path.split("."))


class Sides:
    """What experts of a layer take on each device, as hot ones and as the others."""

    def __init__(self, plans: Sequence[Plan], devices: Sequence[Device], speeds: Sequence[Speed], chosen: float) -> None:
        self.plans, self.devices, self.speeds = plans, devices, speeds
        self.chosen = chosen  # experts that a token is given to

    def split(self, module: Module, config: Any, shares: Sequence[float]) -> Split:
        """`config` is what the rule says, and `shares` fall. Hot experts can't be where their op doesn't run, or on another device
        than the rule's hot_device."""
        step = self.plans[CPU].steps[module.index]
        spec = find(step.operator)
        assert spec is not None
        cold = step.weight_bytes // experts_in(module)
        held, times = [cold], [read_us(self.speeds[CPU], cold * self.chosen, step)]
        for d, device in enumerate(self.devices[1:], 1):
            one = self._one_hot(spec, config, module, step.dtype, device.name)
            held.append(one)
            allowed = self._allowed(spec, config, device)
            op = op_on(spec, spec.ops[config.hot_op], device.name)[0].name
            times.append(read_us(self.speeds[d], one * self.chosen, _by_op(step, op)) if allowed else INFINITE)
        return Split(tuple(shares), tuple(held), tuple(times), tuple(speed.op_us for speed in self.speeds))

    def _one_hot(self, spec: OperatorSpec, config: OperatorConfig, module: Module, dtype: str, device: str) -> int:
        """Bytes of one hot expert on a device."""
        split: Any = replace(config, generate_device="cpu", hot_experts="0", hot_device=device)  # type: ignore[call-arg]
        return spec.footprint(module, split, dtype).elsewhere[device]

    def _allowed(self, spec: OperatorSpec, config: Any, device: Device) -> bool:
        op = spec.ops[config.hot_op]
        old = device.sm is not None and device.sm < op.least_sm
        return not old and device.kind in op.devices and config.hot_device in (None, device.name)


def _by_op(step: Step, op: str) -> Step:
    """A row as it is where that op holds the weights."""
    return step._replace(stored=(), runs={}, kwargs={"generate_op": op})
