"""How a model is laid on a machine: which device holds each layer, and which layers' experts stay in main memory.

Layers keep their order, and each device holds one run of them, so that hidden states cross between devices as seldom as may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ktopt.graph import Module, ModuleGraph
from ktopt.operator import OperatorConfig, dense_footprint
from ktopt.placement import Device, Hardware

SHARE_OF_MEMORY = 0.85
"""How much of a device's memory weights may fill; the rest is for the KV cache and what is computed."""


@dataclass
class Layout:
    """Where a model goes.

    layers    each layer's device
    experts   layers whose experts have room beside the rest; the others' experts are on the CPU. None where a model has none
    ends      the device of the final norm and the head
    start     the device of what else is outside of layers, but for the embedding
    embedding   the device of the embedding
    """

    layers: dict[int, str] = field(default_factory=dict)
    experts: set[int] | None = None
    ends: str = "cpu"
    start: str = "cpu"
    embedding: str = "cpu"

    @property
    def devices(self) -> list[str]:
        """The devices of layers, in order."""
        return list(dict.fromkeys(self.layers[layer] for layer in sorted(self.layers)))


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts: each layer without its experts, each layer's experts, the embedding, and the rest."""

    layers: dict[int, int]
    experts: dict[int, int]
    embedding: int
    ends: int

    @property
    def total(self) -> int:
        return sum(self.layers.values()) + sum(self.experts.values()) + self.embedding + self.ends


def measure(graph: ModuleGraph, dtype: str) -> Sizes:
    """The bytes of a model's parts, with floating-point weights in `dtype`."""
    layers = {m.layer: 0 for m in graph.modules if m.layer is not None}
    experts: dict[int, int] = {}
    embedding = ends = experts_end = 0
    config = OperatorConfig()
    for module in graph.modules:
        if module.role == "experts":
            experts_end = max(experts_end, module.end)
        size = dense_footprint(module, config, dtype).weight_bytes
        if module.index < experts_end and module.layer is not None:
            experts[module.layer] = experts.get(module.layer, 0) + size
        elif module.layer is not None:
            layers[module.layer] += size
        elif _is_embedding(module):
            embedding += size
        else:
            ends += size
    return Sizes(layers, experts, embedding, ends)


def _is_embedding(module: Module) -> bool:
    return module.role == "embedding" or module.name == "embed_tokens"


def lay_out(sizes: Sizes, hardware: Hardware | None, share: float = SHARE_OF_MEMORY, *, tied: bool = False) -> Layout:
    """The layout of a model on a machine; all on the CPU where it has no accelerator or isn't known.

    tied   the head and the embedding are one tensor, which should then be on one device
    """
    devices = [d for d in hardware.devices if d.kind != "cpu"] if hardware else []
    order = sorted(sizes.layers)
    has_experts: set[int] | None = set() if sizes.experts else None
    if not devices or not order:
        return Layout(dict.fromkeys(order, "cpu"), has_experts)
    room = [int(device.memory_bytes * share) for device in devices]
    whole = [sizes.layers[n] + sizes.experts.get(n, 0) for n in order]
    ends = sizes.ends + (sizes.embedding if tied else 0)
    if (split := _split([*whole, ends], room)) is not None:
        return _made(order, split, devices, set(sizes.experts) if sizes.experts else None, tied)
    lean = [sizes.layers[n] for n in order]
    if (split := _split([*lean, ends], room)) is not None:
        made = _made(order, split, devices, has_experts, tied)
        if made.experts is not None:
            _add_experts(made, sizes, dict(zip((d.name for d in devices), room, strict=True)), ends)
        return made
    filled = _fill(lean, room)
    layers = {n: devices[at].name if at is not None else "cpu" for n, at in zip(order, filled, strict=True)}
    return Layout(layers, has_experts, start=layers[order[0]])


def _made(order: Sequence[int], split: Sequence[int], devices: Sequence[Device], experts: set[int] | None, tied: bool) -> Layout:
    names = [devices[at].name for at in split]
    layers = dict(zip(order, names, strict=False))
    return Layout(layers, experts, names[-1], names[0], names[-1] if tied else "cpu")


def _split(units: Sequence[int], room: Sequence[int]) -> list[int] | None:
    """Each unit's device, in order, so that devices are about equally full; None where they don't fit."""
    if _greedy(units, room, 1.0) is None:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _greedy(units, room, middle) is not None else (middle, high)
    even = _even(units, room)
    return even if _fullest(units, room, even) <= min(1.0, 1.15 * high) else _greedy(units, room, high)


def _even(units: Sequence[int], room: Sequence[int]) -> list[int]:
    """Units on devices in order, each device filled to its part of what is left, to the nearest unit."""
    left, space = sum(units), sum(room)
    at, used, found = 0, 0, []
    for size in units:
        goal = left * room[at] / space
        if used and at < len(room) - 1 and used + size / 2 > goal:
            left, space = left - used, space - room[at]
            at, used = at + 1, 0
        found.append(at)
        used += size
    return found


def _fullest(units: Sequence[int], room: Sequence[int], split: Sequence[int]) -> float:
    """How full the fullest device is, as a share of its room."""
    used = [0] * len(room)
    for size, at in zip(units, split, strict=True):
        used[at] += size
    return max(u / r for u, r in zip(used, room, strict=True))


def _greedy(units: Sequence[int], room: Sequence[int], share: float) -> list[int] | None:
    filled = _fill(units, [int(size * share) for size in room])
    return [at for at in filled if at is not None] if None not in filled else None


def _fill(units: Sequence[int], room: Sequence[int]) -> list[int | None]:
    """Units on devices one after another, the next device where one is full; None from where all are."""
    at, used = 0, 0
    found: list[int | None] = []
    for size in units:
        while at < len(room) and used + size > room[at]:
            at, used = at + 1, 0
        found.append(at if at < len(room) else None)
        used += size
    return found


def _add_experts(layout: Layout, sizes: Sizes, room: dict[str, int], ends: int) -> None:
    """Put the experts of as many layers as have room beside the rest of their layer on its device, the first ones first."""
    assert layout.experts is not None
    free = dict(room)
    free[layout.ends] -= ends
    for layer, device in layout.layers.items():
        free[device] -= sizes.layers[layer]
    for layer in sorted(sizes.experts):
        device = layout.layers[layer]
        if sizes.experts[layer] <= free[device]:
            free[device] -= sizes.experts[layer]
            layout.experts.add(layer)
