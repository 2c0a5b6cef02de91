"""The best placement where nothing is pinned to an accelerator: a path of segments, by mixed-integer programming.

Each accelerator that has homes has those of one stretch of items. So devices that are alike needn't be told apart: a placement is a
path from the first item to the last whose steps are segments (kind of device, first item, past the last), with no more steps of a
kind than there are devices of it. The relaxation of a path is a path, which makes the program small work for the solver. Main
memory may be come to any number of times.

How many of a segment's experts stay with it is its own affair as long as main memory has room for the others: a knapsack. Where it
hasn't, the program counts them, by kind k: l of a segment, c in main memory in all, h of these with a home there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ktopt.placing.problem import CPU, INFINITE, Assignment, Part, Problem, Solution, fits
from ktopt.placing.program import MIB, Name, Program, Values

ENDLESS = 1 << 60
"""Bytes that stand for memory that isn't known."""


@dataclass(frozen=True)
class _Segment:
    """A kind of device, and items from `first` to before `past`."""

    kind: int
    first: int
    past: int


class _Segments:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kinds = kinds_of(problem)
        self.last = len(problem.items)
        self.experts: list[Part] = list(dict.fromkeys(item.experts for item in problem.items if item.experts is not None))
        kinds = [None if item.experts is None else self.experts.index(item.experts) for item in problem.items]
        self.before = [list(accumulate((kind == k for kind in kinds), initial=0)) for k in range(len(self.experts))]
        self.homes_before = {kind[0]: self._homes_before(kind[0]) for kind in self.kinds}
        self.room = {s: room for kind in range(len(self.kinds)) for s, room in self._segments(kind)}

    def _segments(self, kind: int) -> Iterator[tuple[_Segment, int]]:
        """Those whose homes a device of this kind may have and has room for, each with what it has left."""
        d, problem = self.kinds[kind][0], self.problem
        limit = problem.room_bytes[d]
        for first in range(self.last):
            held, layers = problem.fixed_bytes[d], 0
            for past in range(first + 1, self.last + 1):
                item = problem.items[past - 1]
                held += item.home.held_bytes[d]
                layers += item.number is not None
                shared = sum(problem.tied_bytes[d : d + 1]) if first == 0 and past == self.last else 0
                passing = problem.transient_bytes[d] * (layers > 0)
                left = (ENDLESS if limit is None else limit) - held - passing + shared
                if not item.home.allows(d):
                    break
                if left >= 0 or d == CPU:
                    yield _Segment(kind, first, past), left

    def device(self, segment: _Segment) -> int:
        return self.kinds[segment.kind][0]

    def counts(self, segment: _Segment) -> list[int]:
        """How many experts of each kind its items have."""
        return [before[segment.past] - before[segment.first] for before in self.before]

    def homes_us(self, segment: _Segment) -> float:
        """The time of a segment's homes, with the way to it, and the way from and to its experts, as if they all were elsewhere."""
        d = self.device(segment)
        time = self.homes_before[d][segment.past] - self.homes_before[d][segment.first]
        return time + self.problem.hop_us[d] * (2 - (segment.first == 0) - (segment.past == self.last))

    def _homes_before(self, d: int) -> list[float]:
        """The time of the homes before each item, on a device, with the ways to their guests; what can't be there takes none."""
        hop = self.problem.hop_us
        each = (
            item.home.time_us[d] + sum(2 * (hop[d] + hop[g]) for g in item.guests if g != d) if item.home.allows(d) else 0.0
            for item in self.problem.items
        )
        return list(accumulate(each, initial=0.0))

    def gains(self, d: int) -> list[float]:
        """The time that experts save on a device, beside their home, against main memory: INFINITE where they can't be there, and
        minus that where they can't be here."""
        hop = 2 * (self.problem.hop_us[d] + self.problem.hop_us[CPU])
        return [p.time_us[CPU] + hop - p.time_us[d] if p.allows(d) else -INFINITE for p in self.experts]

    def kept(self, segment: _Segment) -> tuple[list[int], float] | None:
        """How many experts of each kind a segment of an accelerator keeps best, and the time of all of its experts; None where
        those that can't be in main memory don't fit."""
        d, counts = self.device(segment), self.counts(segment)
        gains, sizes = self.gains(d), [p.held_bytes[d] for p in self.experts]
        must = [k for k, gain in enumerate(gains) if gain == INFINITE]
        room = self.room[segment] - sum(counts[k] * sizes[k] for k in must)
        hop = 2 * (self.problem.hop_us[d] + self.problem.hop_us[CPU])
        if room < 0 or any(counts[k] and not p.allows(CPU) and not p.allows(d) for k, p in enumerate(self.experts)):
            return None
        may = [k for k, gain in enumerate(gains) if 0 < gain < INFINITE]
        best = _knapsack([counts[k] for k in may], [sizes[k] for k in may], [gains[k] for k in may], room)
        kept = [counts[k] if k in must else 0 for k in range(len(counts))]
        for k, count in zip(may, best, strict=True):
            kept[k] = count
        here = sum(count * p.time_us[d] for count, p in zip(kept, self.experts, strict=True) if count)
        away = zip(counts, kept, self.experts, strict=True)
        return kept, here + sum((all_ - count) * (p.time_us[CPU] + hop) for all_, count, p in away if all_ > count)

    def path(self, *, counted: bool) -> Program:
        """The program of a path; with experts `counted`, or each segment's kept as is best for itself."""
        made, problem = Program(), self.problem
        for s in self.room:
            d, cost = self.device(s), self.homes_us(s)
            if not counted and d == CPU:
                if any(count and not p.allows(CPU) for count, p in zip(self.counts(s), self.experts, strict=True)):
                    continue
                cost += sum(n * p.time_us[CPU] for n, p in zip(self.counts(s), self.experts, strict=True) if n)
            elif not counted:
                if (kept := self.kept(s)) is None:
                    continue
                cost += kept[1]
            made.variable(("y", s), 1, cost)
        for node in range(self.last + 1):
            terms: list[tuple[Name, float]] = [(("y", s), 1.0) for s in self.room if s.first == node and ("y", s) in made.index]
            terms += [(("y", s), -1.0) for s in self.room if s.past == node and ("y", s) in made.index]
            flow = (node == 0) - (node == self.last)
            made.row(terms, flow, flow)
        for kind, devices in enumerate(self.kinds):
            if devices[0] != CPU:
                made.row([(name, 1.0) for name in made.index if name[0] == "y" and name[1].kind == kind], 0, len(devices))
        if counted:
            self._count(made)
        self._main_memory(made, problem, counted)
        return made

    def _count(self, made: Program) -> None:
        """Experts by number: what segments keep, and what is in main memory."""
        problem = self.problem
        total = self.counts(_Segment(0, 0, self.last))
        everywhere: list[list[tuple[Name, float]]] = [[] for _ in self.experts]
        for s, room in self.room.items():
            d = self.device(s)
            if d == CPU:
                continue
            hop = 2 * (problem.hop_us[d] + problem.hop_us[CPU])
            held: list[tuple[Name, float]] = [(("y", s), -room / MIB)]
            for k, (count, part) in enumerate(zip(self.counts(s), self.experts, strict=True)):
                if not count:
                    continue
                made.add(("y", s), count * hop)
                made.variable(("l", s, k), count * part.allows(d), (part.time_us[d] if part.allows(d) else 0.0) - hop)
                made.row([(("l", s, k), 1.0), (("y", s), -float(count))], -INFINITE, 0)
                held.append((("l", s, k), part.held_bytes[d] / MIB))
                everywhere[k].append((("l", s, k), 1.0))
            made.row(held, -INFINITE, 0)
        for k, part in enumerate(self.experts):
            made.variable(("c", k), total[k] * part.allows(CPU), part.time_us[CPU] if part.allows(CPU) else 0.0)
            made.row([*everywhere[k], (("c", k), 1.0)], total[k], total[k])

    def _main_memory(self, made: Program, problem: Problem, counted: bool) -> None:
        """What main memory holds. Where segments keep what is best for themselves, of homes alone."""
        segments = [s for s in self.room if self.device(s) == CPU and ("y", s) in made.index]
        room = problem.room_bytes[CPU]
        if room is None:
            return
        made.variable(("has",), 1)
        held: list[tuple[Name, float]] = [(("has",), problem.transient_bytes[CPU] / MIB)]
        for s in segments:
            items = problem.items[s.first : s.past]
            held.append((("y", s), sum(item.home.held_bytes[CPU] for item in items) / MIB))
            if any(item.number is not None for item in items):
                made.row([(("has",), 1.0), (("y", s), -1.0)], 0, 1)
        if problem.tied_bytes:
            made.variable(("tied",), 1)
            held.append((("tied",), -problem.tied_bytes[CPU] / MIB))
            for end in ([s for s in segments if s.first == 0], [s for s in segments if s.past == self.last]):
                made.row([(("tied",), 1.0), *((("y", s), -1.0) for s in end)], -INFINITE, 0)
        if counted:
            held += [(("c", k), part.held_bytes[CPU] / MIB) for k, part in enumerate(self.experts)]
        made.row(held, -INFINITE, (room - problem.fixed_bytes[CPU]) / MIB)

    def assignment(self, values: Values, *, counted: bool) -> Assignment:
        """Devices of a kind are taken in their order along the path."""
        free = [list(devices) for devices in self.kinds]
        path = sorted((s for s in self.room if values.get(("y", s))), key=lambda s: s.first)
        homes: list[int] = []
        experts: list[int | None] = []
        for s in path:
            d = CPU if self.device(s) == CPU else free[s.kind].pop(0)
            kept = [0] * len(self.experts)
            if d != CPU and counted:
                kept = [values.get(("l", s, k), 0) for k in range(len(self.experts))]
            elif d != CPU:
                kept = (self.kept(s) or (kept, 0.0))[0]
            homes += [d] * (s.past - s.first)
            experts += self._experts(s, d, kept)
        return Assignment(tuple(homes), tuple(experts))

    def _experts(self, s: _Segment, d: int, kept: Sequence[int]) -> list[int | None]:
        """Where a segment's experts are: the first ones of each kind are kept."""
        items, here = self.problem.items, set[int]()
        for part, count in zip(self.experts, kept, strict=True):
            here.update([i for i in range(s.first, s.past) if items[i].experts == part][:count])
        return [None if items[i].experts is None else d if i in here else CPU for i in range(s.first, s.past)]


def _knapsack(counts: Sequence[int], sizes: Sequence[int], gains: Sequence[float], room: int) -> list[int]:
    """How many of each kind to take for the greatest gain, in so much room: kinds in order of gain by size, branch and bound."""
    order = sorted(range(len(counts)), key=lambda k: -gains[k] / max(1, sizes[k]))
    best: tuple[float, list[int]] = (-1.0, [0] * len(counts))

    def take(at: int, left: int, gain: float, taken: list[int]) -> None:
        nonlocal best
        if gain > best[0]:
            best = (gain, [*taken, *[0] * (len(order) - at)])
        if at == len(order) or (gain + left * gains[order[at]] / max(1, sizes[order[at]]) <= best[0] and sizes[order[at]]):
            return
        k = order[at]
        most = counts[k] if not sizes[k] else min(counts[k], left // sizes[k])
        for count in range(most, -1, -1):
            take(at + 1, left - count * sizes[k], gain + count * gains[k], [*taken, count])

    take(0, room, 0.0, [])
    found = [0] * len(counts)
    for k, count in zip(order, best[1], strict=True):
        found[k] = count
    return found


def kinds_of(problem: Problem) -> list[list[int]]:
    """Devices in groups of those that differ in their name alone; main memory is one of its own."""
    groups: dict[object, list[int]] = {}
    for d in range(len(problem.devices)):
        columns = tuple((p.held_bytes[d], p.time_us[d]) for i in problem.items for p in (i.home, i.experts) if p is not None)
        guests = any(d in item.guests for item in problem.items)
        key = (problem.room_bytes[d], problem.hop_us[d], problem.transient_bytes[d], problem.fixed_bytes[d], columns)
        groups.setdefault((key, problem.tied_bytes[d : d + 1], d if guests or d == CPU else -1), []).append(d)
    return list(groups.values())


def solve_by_segments(problem: Problem) -> Solution | None:
    """The placement with the least time among those in which each accelerator has one stretch of items; None where none fits."""
    if any(room is not None and fixed > room for room, fixed in zip(problem.room_bytes, problem.fixed_bytes, strict=True)):
        return None
    built = _Segments(problem)
    for counted in (False, True):
        found = built.path(counted=counted).solved()
        if found is None:
            return None  # with main memory without end for experts there is none, or none at all
        made = built.assignment(found[0], counted=counted)
        if counted or fits(problem, made):
            return Solution(made, found[1])
    return None
