"""What every format draws: a plan folded to groups, what passes between them, and what each device holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ktopt.diagnostics import UsageError
from ktopt.folded import Group, fold_plan
from ktopt.graph import ModuleGraph
from ktopt.hardware import preset
from ktopt.picture.edges import Edge, edges_of
from ktopt.placement import Hardware
from ktopt.plan import Plan, Step

KINDS = ("experts", "attention", "mlp", "embedding", "other")
"""Kinds of weights, in the order in which bars show them. The head counts with the embedding, shared experts with the MLPs."""
BESIDE = ("cache", "transient")
"""What a device holds besides while a context is computed."""
DISK = "disk"
"""Where a cache of blocks keeps what no memory has room for: no device, and so no lane."""
_OWN_KIND = {
    "experts": "experts",
    "attention": "attention",
    "mlp": "mlp",
    "embedding": "embedding",
    "moe": "other",
    "layer": "other",
}


@dataclass(frozen=True)
class DeviceUse:
    """What a device holds, in bytes by kind; what it has, 0 where nobody said; its model ("RTX 4090") where known."""

    name: str
    nbytes: Mapping[str, int]
    memory_bytes: int = 0
    model: str = ""

    @property
    def held_bytes(self) -> int:
        return sum(self.nbytes.values())

    @property
    def weight_bytes(self) -> int:
        return sum(self.nbytes.get(kind, 0) for kind in KINDS)


@dataclass(frozen=True)
class Picture:
    """A plan's groups from the root, the edges between them, and its devices: accelerators in order, main memory last.

    tree      the model's tree, by which sizes are known; None for a plan of a module without a config
    unfolded  each module stands by itself
    context   tokens of context whose cache, and what passes for a moment, devices hold too; None for weights alone
    """

    plan: Plan
    root: Group
    edges: tuple[Edge, ...]
    devices: tuple[DeviceUse, ...]
    tree: ModuleGraph | None = None
    unfolded: bool = False
    context: int | None = None

    @property
    def lanes(self) -> tuple[DeviceUse, ...]:
        """The devices that modules can be on."""
        return tuple(device for device in self.devices if device.name != DISK)

    @property
    def title(self) -> str:
        """ "deepseek-v3, deepseek-v3/24gb.yaml, 1x24GB, bfloat16": of paths the last two parts."""
        paths = (Path(text) for text in (self.plan.model.source, self.plan.rule_file))
        return ", ".join(filter(None, (*("/".join(path.parts[-2:]) for path in paths), self.plan.hardware, self.plan.dtype)))

    @property
    def transfer_bytes(self) -> int | None:
        """Bytes that a token moves between devices; None where part of that isn't known."""
        sizes = [edge.nbytes for edge in self.edges]
        return None if None in sizes else sum(size or 0 for size in sizes)


def picture_of(
    plan: Plan, tree: ModuleGraph | None, hardware: Hardware | None = None, *, everything: bool = False, unfold: bool = False
) -> Picture:
    """The picture of a plan.

    tree        the tree that the plan was made for, where there is one
    hardware    the machine; where it isn't given, the preset that the plan names
    everything  with modules that have neither weights nor a rule, and those inside closed ones
    unfold      each module by itself
    """
    root = fold_plan(plan, everything, unfold=unfold)
    machine = hardware or _machine_named(plan.hardware)
    return Picture(plan, root, edges_of(plan, root, tree), devices_of(plan, machine), tree, unfold)


def with_context(picture: Picture, context: int, beside: Mapping[str, tuple[int, int]]) -> Picture:
    """A picture whose devices hold also what a context of so many tokens takes: its cache's bytes, and the most for a moment."""
    devices = [
        replace(d, nbytes={**d.nbytes, **{k: n for k, n in zip(BESIDE, beside.get(d.name, ()), strict=False) if n}})
        for d in picture.devices
    ]
    if beside.get(DISK, (0,))[0]:
        devices.append(DeviceUse(DISK, {"cache": beside[DISK][0]}))
    return replace(picture, devices=tuple(devices), context=context)


def _machine_named(name: str) -> Hardware | None:
    """The machine that a plan was made for, where that was a preset."""
    try:
        return preset(name)
    except UsageError:  # a plan by someone else may say anything
        return None


def devices_of(plan: Plan, hardware: Hardware | None) -> tuple[DeviceUse, ...]:
    """What each device holds: those that the plan uses, accelerators by number, main memory last."""
    held: dict[str, dict[str, int]] = {device: {} for device in plan.devices}
    kinds: dict[str, str] = {}
    for step in plan.steps:
        kind = kinds[step.path] = _kind(step, kinds.get(step.path.rpartition(".")[0], ""))
        for device, count in step.held_bytes.items():
            if count:
                mine = held.setdefault(device, {})
                mine[kind or "other"] = mine.get(kind or "other", 0) + count
    found = []
    for name in sorted(held, key=device_order):
        card = hardware.device(name) if hardware else None
        memory = card.memory_bytes if card else hardware.ram_bytes if hardware and name == "cpu" else 0
        by_kind = {kind: held[name][kind] for kind in KINDS if held[name].get(kind)}
        found.append(DeviceUse(name, by_kind, memory, card.model if card else ""))
    return tuple(found)


def bytes_elsewhere(plan: Plan, group: Group) -> dict[str, int]:
    """Of a group's own bytes, what is on other devices than its own: hot experts."""
    found: dict[str, int] = {}
    for path in group.paths if group.step.elsewhere else ():
        for device, count in plan.by_path[path].elsewhere.items():
            found[device] = found.get(device, 0) + count
    return found


def device_order(name: str) -> tuple[bool, str, int]:
    """Accelerators by kind and number, main memory last."""
    kind, _, number = name.partition(":")
    return kind == "cpu", kind, int(number or 0)


def _kind(step: Step, above: str) -> str:
    """A module's kind of weights, by its role and by its parent's kind; "" where neither tells, as at the top."""
    if above in ("experts", "attention", "mlp"):
        return above
    if step.role == "linear" and not above:
        return "embedding"
    return _OWN_KIND.get(step.role, above)
