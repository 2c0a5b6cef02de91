"""Whether a rule set that ships suits a model on a machine: it is compiled for both, and what its plan takes is compared with what
the machine has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ktopt.choosing.sets import ShippedSet, is_of, name_for, shipped_sets
from ktopt.compiler import run_stages
from ktopt.diagnostics import Diagnostic
from ktopt.graph import ModuleGraph
from ktopt.hardware import preset
from ktopt.placement import Hardware
from ktopt.placing.estimate import token_time_us
from ktopt.placing.units import RESERVED_BYTES, RESERVED_SHARE
from ktopt.plan import Plan
from ktopt.plan_options import PlanOptions
from ktopt.render.style import plural, size
from ktopt.ruleset import RuleSet
from ktopt.selection.architectures import is_for
from ktopt.weights.source import StoredTensor
from ktopt.weights.storage import stored_for
from ktopt.weights.usual import usual_storage
from ktopt.working_memory import DeviceMemory, Reckoning, over_limits

DEFAULT_CONTEXT = 8192
"""Tokens of context that memory is reckoned for where nobody says."""
DEFAULT_STORAGE = "Q4_K_M"
"""How weights are taken to be stored where none are given."""
STEP = 1024
"""Contexts are whole multiples of so many tokens."""
ENDLESS = 1 << 20
"""The longest context that is looked at, of a model whose config tells none."""


@dataclass(frozen=True)
class Fit:
    """A set for a model on a machine.

    name       what the set is called for this model
    plan       None where none could be made
    memory     what each device holds for the context
    room       bytes that each of them may hold; without those whose memory isn't known
    reason     why the set doesn't suit, "" where it does
    other_size whether that is because it was written for a model of another size
    longest    tokens of the longest context that the machine has room for, up to the model's own
    token_us   estimated time of a decoded token; None where the set doesn't suit, or nobody asked
    """

    shipped: ShippedSet
    name: str
    plan: Plan | None
    memory: tuple[DeviceMemory, ...]
    room: Mapping[str, int]
    reason: str = ""
    other_size: bool = False
    longest: int = 0
    token_us: float | None = None

    @property
    def main_memory(self) -> int:
        return sum(each.together for each in self.memory if each.device == "cpu")

    @property
    def fullest_card(self) -> int:
        """Bytes on the card that holds most; 0 where it uses none."""
        return max((each.together for each in self.memory if each.device not in ("cpu", "disk")), default=0)


@dataclass(frozen=True)
class Asked:
    """What is asked for beside a model: the machine, None for the one that each set is for; the context; and the weights, or how
    they are taken to be stored."""

    hardware: Hardware | None = None
    context: int = DEFAULT_CONTEXT
    weights: Any = None
    storage: str = DEFAULT_STORAGE


def fits_of(graph: ModuleGraph, asked: Asked, *, timed: bool = False) -> list[Fit]:
    """Every set that is for the model's architecture: those that suit come first, if `timed` the fastest of them, then those that
    lack memory, by how much, then those that lack a device, then those for other sizes."""
    found = [fit(each, graph, asked) for each in shipped_sets() if is_for(_ruleset(each).architectures, graph)]
    found = [_timed(each, graph, asked) if timed and not each.reason else each for each in found]
    return sorted(found, key=lambda each: (*_rank(each), not is_of(each.name, graph.name), each.name))


def _rank(fit: Fit) -> tuple[int, float]:
    if not fit.reason or fit.other_size:
        return 3 * fit.other_size, fit.token_us or 0.0
    lacking = sum(each.together - fit.room[each.device] for each in over_limits(fit.memory, fit.room))
    return (1, lacking) if lacking else (2, 0.0)


def fit(shipped: ShippedSet, graph: ModuleGraph, asked: Asked) -> Fit:
    """The set for the model on the machine."""
    hardware = _machine(shipped, asked)
    name, room = name_for(shipped, graph.name), room_of(hardware)
    compilation = run_stages(shipped.path, graph, weights=asked.weights, hardware=hardware, storage=asked.storage)
    plan, errors = compilation.plan, compilation.report.errors
    if plan is None:
        return Fit(shipped, name, None, (), room, _said(errors))
    reckoning = Reckoning(plan, graph, _stored(graph, asked))
    memory = tuple(reckoning.memory(asked.context, limits=room))
    made = Fit(shipped, name, plan, memory, room)
    if other := next((each for each in errors if each.code.startswith("KT3")), None):
        return replace(made, reason=f"for a model of another size: {other.message}", other_size=True)
    reason = _lacking(plan, hardware) or _too_little(made) or _said(errors)
    return replace(made, reason=reason, longest=0 if reason else longest_context(reckoning, room))


def _machine(shipped: ShippedSet, asked: Asked) -> Hardware:
    hardware = asked.hardware or preset(shipped.machine)
    assert hardware is not None, shipped.machine
    return hardware


def room_of(hardware: Hardware) -> dict[str, int]:
    """Bytes that each device may hold, as `ktopt place` reckons; without those whose memory isn't known."""
    room = {device.name: device.memory_bytes - RESERVED_BYTES for device in hardware.devices if device.memory_bytes}
    return room | ({"cpu": int(hardware.ram_bytes * (1 - RESERVED_SHARE))} if hardware.ram_bytes else {})


def longest_context(reckoning: Reckoning, room: Mapping[str, int]) -> int:
    """The most tokens of context with which no device holds more than it may, up to what the model itself takes."""
    most = int(reckoning.plan.model.config.get("max_position_embeddings") or ENDLESS)

    def there_is_room(context: int) -> bool:
        return not over_limits(reckoning.memory(context, limits=room), room)

    if there_is_room(most):
        return most
    least, beyond = 0, most // STEP
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if there_is_room(middle * STEP) else (least, middle)
    return least * STEP


def _stored(graph: ModuleGraph, asked: Asked) -> Mapping[str, StoredTensor] | None:
    return stored_for(None, asked.weights, graph) if asked.weights else usual_storage(graph, asked.storage)


@cache
def _ruleset(shipped: ShippedSet) -> RuleSet:
    ruleset = run_stages(shipped.path).ruleset
    assert ruleset is not None, shipped.name
    return ruleset


def _timed(fit: Fit, graph: ModuleGraph, asked: Asked) -> Fit:
    hardware = _machine(fit.shipped, asked)
    stored = _stored(graph, asked)
    options = PlanOptions(hardware=hardware)
    return replace(fit, token_us=token_time_us(_ruleset(fit.shipped), graph, hardware, options, stored, asked.context))


def _lacking(plan: Plan, hardware: Hardware) -> str:
    if all(hardware.has(device) for device in plan.devices):
        return ""
    cards = [device for device in plan.devices if device != "cpu"]
    have = len(hardware.devices) or "none"
    return f"it needs {plural(len(cards), 'card')}, and {hardware.name} has {have}"


def _too_little(fit: Fit) -> str:
    return "; ".join(
        f"{'main memory' if each.device == 'cpu' else each.device} would hold {size(each.together)}, and has room for "
        f"{size(fit.room[each.device])}"
        for each in over_limits(list(fit.memory), dict(fit.room))
    )


def _said(errors: Sequence[Diagnostic]) -> str:
    return next((each.message for each in errors), "")
