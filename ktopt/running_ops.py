"""Whether the op that a rule names runs where its modules are, by kind of device and by how old a card is; and where those of a
layer's experts are that a rule has on another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ktopt.diagnostics import Report
from ktopt.operator import Op, OperatorSpec, op_on
from ktopt.placement import Hardware, device_kind
from ktopt.ruleset import Rule

NAMED = ("generate_op", "hot_op")
"""The kwargs whose op must run; another gives way without a word."""


def young_enough(hardware: Hardware | None, rule: Rule, spec: OperatorSpec, op: Op, kwarg: str, device: str, report: Report) -> Op:
    """The op, or a counterpart where nobody asked for it and the machine's device is too old for it; KT406 where a rule did."""
    found = hardware.device(device) if hardware else None
    if found is None or found.sm is None or found.sm >= op.least_sm:
        return op
    other, _ = op_on(spec, spec.ops[op.counterpart], device)
    if kwarg not in rule.replace.given:
        return other
    if kwarg in NAMED:
        needs = f"{op.name} needs compute capability {op.least_sm / 10:.1f}, and {device} has {found.sm / 10:.1f}"
        origin = rule.replace.kwarg_origins.get(kwarg, rule.replace.origin)
        help = f"name {other.name}, or place the modules on a newer device"
        report.error("KT406", f"rule {rule.number} kwargs.{kwarg}: {needs}", origin, help=help)
    return op


def check_op(rule: Rule, kwarg: str, asked: Op, chosen: Op, device: str, report: Report) -> None:
    """KT406: the op that a rule names doesn't run where its modules are; without a remapping that is a mistake."""
    kind, kinds = device_kind(device), " or ".join(asked.devices)
    if kind in asked.devices or kwarg not in NAMED:
        return
    report.error(
        "KT406",
        f"rule {rule.number} kwargs.{kwarg}: {asked.name} runs on {kinds} only, and its modules are on {device}",
        rule.replace.kwarg_origins.get(kwarg, rule.replace.origin),
        help=f"name {chosen.name} for {kind}, or place the modules on {kinds}",
    )


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a module stands whose experts a rule splits: its layer, and the device of the block around it."""

    layer: int | None
    around: str


def hot_kwargs(rule: Rule, spot: Spot | None, placed: Callable[[str], str]) -> dict[str, Any]:
    """hot_experts and hot_device as one layer has them, and where its result goes unless the rule says; nothing of an operator that
    has no such kwargs. `placed` is the device that a named one stands for here."""
    config: Any = rule.replace.config
    if not hasattr(config, "hot_experts"):
        return {}
    hot = config.hot_experts
    if isinstance(hot, Mapping):
        hot = {spot.layer: hot[spot.layer]} if spot is not None and spot.layer in hot else None
    if not hot or spot is None:
        return {"hot_experts": None, "hot_device": None}
    result = {} if "out_device" in rule.replace.given else {"out_device": spot.around}
    return {"hot_experts": hot, "hot_device": placed(config.hot_device) if config.hot_device else spot.around, **result}
