"""A placement as numbers: what there is to place, in the order in which a token passes it, and what a placement of it costs.

A token passes items one after another: the embedding, each layer, the head. An item's home (attention with its cache, router,
shared experts, norms) is on one device, its routed experts on one that may be another. Two homes in a row on different devices are
a hop; so is the way to experts elsewhere, and the way back. A hop between a and b takes hop_us[a] + hop_us[b].

Where it is known how often each expert is chosen, some of a layer's experts, those chosen most, may be on their home's device while
the others are in main memory (`Split`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

INFINITE = float("inf")
CPU = 0
"""Main memory's place among a problem's devices."""


@dataclass(frozen=True)
class Part:
    """What is placed as one. Tuples are by device.

    held_bytes   weights and cache
    time_us      of a decoded token; INFINITE where it can't be
    host_bytes   what main memory holds for it while it is there; () where that is nothing
    """

    held_bytes: tuple[int, ...]
    time_us: tuple[float, ...]
    host_bytes: tuple[int, ...] = ()

    def host(self, device: int) -> int:
        return self.host_bytes[device] if self.host_bytes else 0

    def allows(self, device: int) -> bool:
        return self.time_us[device] != INFINITE


@dataclass(frozen=True)
class Split:
    """A layer's experts one by one, those chosen most first. Tuples but the first are by device.

    shares      the part of all choices that each takes; they fall, and sum to 1
    held_bytes  what one of them takes there beside others that are elsewhere; in main memory, one of those others
    time_us     of a token all of whose choices are there, without op_us; INFINITE where hot experts can't be
    op_us       what experts take at least where there are any
    """

    shares: tuple[float, ...]
    held_bytes: tuple[int, ...]
    time_us: tuple[float, ...]
    op_us: tuple[float, ...]

    def allows(self, device: int) -> bool:
        return device != CPU and self.time_us[device] != INFINITE

    @cached_property
    def chosen(self) -> tuple[float, ...]:
        """The part of the choices that the first n take, for n from 0 on."""
        return tuple(accumulate(self.shares, initial=0.0))

    def both_us(self, device: int, count: int) -> float:
        """The time of both sides, so many experts being on a device: more than none, and not all."""
        here = self.chosen[count]
        return self.op_us[device] + here * self.time_us[device] + self.op_us[CPU] + (1 - here) * self.time_us[CPU]


@dataclass(frozen=True)
class Item:
    """An embedding, a layer or a head. Equal items may be exchanged for each other.

    home, experts   its parts; experts is None where there are none, or where they were counted with the home
    guests          devices to which other parts of it are pinned: a token goes there and back from its home
    label           what it is, for people: "layer 3"
    number          of a layer
    split           its experts one by one, where that is known
    """

    home: Part
    experts: Part | None = None
    guests: tuple[int, ...] = ()
    label: str = field(default="", compare=False)
    number: int | None = field(default=None, compare=False)
    split: Split | None = None


@dataclass(frozen=True)
class Problem:
    """devices          names
    room_bytes       what each may hold; None where that isn't known
    hop_us           half of a hop that ends or begins at a device
    transient_bytes  held for a moment on a device that has a layer's home
    items            in order
    fixed_bytes      what pinned parts hold that have no item's choice, by device
    fixed_us         their time
    tied_bytes       by device, what is held once where the first item and the last one are both there
    pinned           accelerators to which something is pinned; others have one stretch of items at most
    """

    devices: tuple[str, ...]
    room_bytes: tuple[int | None, ...]
    hop_us: tuple[float, ...]
    transient_bytes: tuple[int, ...]
    items: tuple[Item, ...]
    fixed_bytes: tuple[int, ...]
    fixed_us: float = 0.0
    tied_bytes: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """The device of each item's home and of its experts (None where it has none). `hot` says how many of an item's experts are on
    its home's device where the others are in main memory; () where none are."""

    homes: tuple[int, ...]
    experts: tuple[int | None, ...]
    hot: tuple[int, ...] = ()

    def hot_of(self, number: int) -> int:
        return self.hot[number] if self.hot else 0


@dataclass(frozen=True)
class Solution:
    """A placement; `proved` where no other is better."""

    assignment: Assignment
    proved: bool


def time_us(problem: Problem, assignment: Assignment) -> float:
    """The estimated time of a decoded token."""
    total, hop = problem.fixed_us, problem.hop_us
    for number, (item, home, experts) in enumerate(zip(problem.items, assignment.homes, assignment.experts, strict=True)):
        total += item.home.time_us[home]
        if item.experts is not None and experts is not None:
            hot = assignment.hot_of(number)
            total += item.experts.time_us[experts] if not hot or item.split is None else item.split.both_us(home, hot)
            total += 2 * (hop[home] + hop[experts]) if experts != home else 0.0
        total += sum(2 * (hop[home] + hop[guest]) for guest in item.guests if guest != home)
        before = assignment.homes[number - 1] if number else home
        total += hop[before] + hop[home] if before != home else 0.0
    return total


def held_bytes(problem: Problem, assignment: Assignment) -> list[int]:
    """What each device holds, with what it holds for a moment."""
    held = list(problem.fixed_bytes)
    for number, (item, home, experts) in enumerate(zip(problem.items, assignment.homes, assignment.experts, strict=True)):
        held[home] += item.home.held_bytes[home]
        held[CPU] += item.home.host(home)
        hot = assignment.hot_of(number)
        if hot and item.split is not None:
            held[home] += hot * item.split.held_bytes[home]
            held[CPU] += (len(item.split.shares) - hot) * item.split.held_bytes[CPU]
        elif item.experts is not None and experts is not None:
            held[experts] += item.experts.held_bytes[experts]
    for device in {home for item, home in zip(problem.items, assignment.homes, strict=True) if item.number is not None}:
        held[device] += problem.transient_bytes[device]
    if problem.tied_bytes and assignment.homes[0] == assignment.homes[-1]:
        held[assignment.homes[0]] -= problem.tied_bytes[assignment.homes[0]]
    return held


def fits(problem: Problem, assignment: Assignment) -> bool:
    """Whether nothing is where it can't be and no device holds more than it has room for; and of accelerators to which nothing is
    pinned, whether each has one stretch of items, and no experts whose home is elsewhere."""
    for item, home, experts in zip(problem.items, assignment.homes, assignment.experts, strict=True):
        if not item.home.allows(home) or (item.experts is not None and experts is not None and not item.experts.allows(experts)):
            return False
        if experts not in (None, home, CPU, *problem.pinned):
            return False
    for number, (item, home, experts) in enumerate(zip(problem.items, assignment.homes, assignment.experts, strict=True)):
        if hot := assignment.hot_of(number):
            split = item.split
            if split is None or not split.allows(home) or experts != CPU or not 0 < hot < len(split.shares):
                return False
    visits = [home for number, home in enumerate(assignment.homes) if not number or assignment.homes[number - 1] != home]
    if any(visits.count(d) > 1 for d in range(len(problem.devices)) if d not in (CPU, *problem.pinned)):
        return False
    held = held_bytes(problem, assignment)
    return all(room is None or count <= room for room, count in zip(problem.room_bytes, held, strict=True))


def runs_of(items: Sequence[Item]) -> list[tuple[int, int]]:
    """Stretches of equal items in a row, each as (first, past the last)."""
    found: list[tuple[int, int]] = []
    for number, item in enumerate(items):
        if found and items[found[-1][0]] == item and (item.number is None) == (items[found[-1][0]].number is None):
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found
