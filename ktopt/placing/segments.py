"""The best placement where nothing is pinned to an accelerator: a path of segments.

Each accelerator that has homes has those of one stretch of items. So devices that are alike needn't be told apart: a placement is
a path from the first item to the last whose steps are segments (kind of device, first item, past the last), with no more steps of
a kind than there are devices of it. Main memory may be come to any number of times.

How many of a segment's experts stay with it is its own affair as long as main memory has room for the others: a knapsack, and the
path is then found by dynamic programming. Where main memory hasn't, the same is done for time and main memory together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from ktopt.placing.problem import CPU, INFINITE, Assignment, Part, Problem, Solution, fits

ENDLESS = 1 << 60
"""Bytes that stand for memory that isn't known."""


@dataclass(frozen=True)
class Segment:
    """A kind of device, and items from `first` to before `past`."""

    kind: int
    first: int
    past: int


Used = tuple[int, ...]
_Path = tuple[Any, ...]
"""(path before, segment, experts kept of each kind), or () at the beginning."""
_Step = tuple[Segment, tuple[float, float], list[int]]
_Kept = TypeVar("_Kept")


class Segments:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kinds = kinds_of(problem)
        self.last = len(problem.items)
        self.none_used: Used = (0,) * len(self.kinds)
        self.experts: list[Part] = list(dict.fromkeys(item.experts for item in problem.items if item.experts is not None))
        kinds = [None if item.experts is None else self.experts.index(item.experts) for item in problem.items]
        self.before = [list(accumulate((kind == k for kind in kinds), initial=0)) for k in range(len(self.experts))]
        self.homes_before = {kind[0]: self._homes_before(kind[0]) for kind in self.kinds}
        self.room = {s: room for kind in range(len(self.kinds)) for s, room in self._segments(kind)}

    def _segments(self, kind: int) -> Iterator[tuple[Segment, int]]:
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
                    yield Segment(kind, first, past), left

    def device(self, segment: Segment) -> int:
        return self.kinds[segment.kind][0]

    def counts(self, segment: Segment) -> list[int]:
        """How many experts of each kind its items have."""
        return [before[segment.past] - before[segment.first] for before in self.before]

    def homes_us(self, segment: Segment) -> float:
        """The time of a segment's homes, with the way to it, and the way from and to its experts, as if they all were elsewhere."""
        d = self.device(segment)
        time = self.homes_before[d][segment.past] - self.homes_before[d][segment.first]
        return time + self.problem.hop_us[d] * (2 - (segment.first == 0) - (segment.past == self.last))

    def homes_in_memory(self, segment: Segment) -> int:
        """What main memory holds of a segment's homes."""
        d, items = self.device(segment), self.problem.items[segment.first : segment.past]
        return sum((item.home.held_bytes[CPU] if d == CPU else 0) + item.home.host(d) for item in items)

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

    def kept(self, segment: Segment) -> tuple[list[int], float] | None:
        """How many experts of each kind a segment keeps best, where main memory has room for the others, and the time of all of its
        experts; None where those that can't be in main memory don't fit."""
        d, counts = self.device(segment), self.counts(segment)
        if d == CPU:
            times = [n * p.time_us[CPU] for n, p in zip(counts, self.experts, strict=True) if n]
            return None if INFINITE in times else ([0] * len(counts), sum(times))
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

    def shortest(self) -> Assignment | None:
        """The best path where main memory holds whatever comes to it, by dynamic programming over the items passed and the
        devices of each kind used; None where there is none."""
        reached: list[dict[Used, tuple[float, _Path]]] = [{} for _ in range(self.last + 1)]
        reached[0][self.none_used] = (0.0, ())
        steps: dict[int, list[tuple[Segment, list[int], float]]] = {}
        for s in self.room:
            if (kept := self.kept(s)) is not None:
                steps.setdefault(s.first, []).append((s, kept[0], self.homes_us(s) + kept[1]))
        for first in range(self.last):
            for used, (so_far, path) in reached[first].items():
                for s, kept_, time in steps.get(first, ()):
                    then = self.with_one_more(used, s)
                    before = reached[s.past].get(then) if then is not None else None
                    if then is not None and (before is None or so_far + time < before[0]):
                        reached[s.past][then] = (so_far + time, (path, s, kept_))
        best = min(reached[self.last].values(), key=lambda each: each[0], default=None)
        return None if best is None else self.assignment(best[1])

    def with_one_more(self, used: Used, s: Segment) -> Used | None:
        """How many devices of each kind are used with a segment more, None where none is left; main memory is not counted."""
        if self.device(s) == CPU:
            return used
        if used[s.kind] == len(self.kinds[s.kind]):
            return None
        return (*used[: s.kind], used[s.kind] + 1, *used[s.kind + 1 :])

    def within(self, room: int) -> Assignment | None:
        """The best path where main memory has so much room: as `shortest`, but of each state all ways to it are kept of which none
        is better than another both in time and in what main memory holds, and from which the end can still be come to."""
        steps: dict[int, list[_Step]] = {}
        for s in self.room:
            steps.setdefault(s.first, []).extend(self._steps(s))
        least_us, least_bytes = self._to_go(steps, 0), self._to_go(steps, 1)
        best, best_path = INFINITE, None
        ways: list[dict[tuple[Used, int], list[tuple[float, int, _Path]]]] = [{} for _ in range(self.last + 1)]
        ways[0][self.none_used, 0] = [(0.0, 0, ())]
        for first in range(self.last):
            for (used, flags), found in ways[first].items():
                for so_far, held, path in undominated(found):
                    for s, costs, kept in steps.get(first, ()):
                        then = self.with_one_more(used, s)
                        if then is None:
                            continue
                        on_cpu = self._flags(s, flags)
                        time, bytes_ = so_far + costs[0], held + int(costs[1]) + self._shared(s, flags, on_cpu)
                        spare = self.problem.tied_bytes[CPU] if self.problem.tied_bytes else 0
                        if (
                            time + least_us[s.past].get(then, INFINITE) >= best
                            or bytes_ + least_bytes[s.past].get(then, INFINITE) > room + spare
                        ):
                            continue
                        if s.past < self.last:
                            ways[s.past].setdefault((then, on_cpu), []).append((time, bytes_, (path, s, kept)))
                        elif bytes_ <= room:
                            best, best_path = time, (path, s, kept)
            ways[first] = {}
        return None if best_path is None else self.assignment(best_path)

    def _steps(self, s: Segment) -> list[_Step]:
        """The ways in which a segment may keep its experts, none better than another in both: each with its time and with what it
        leaves to main memory."""
        d, counts, part = self.device(s), self.counts(s), self.experts
        homes = self.homes_in_memory(s)
        hop = 0.0 if d == CPU else 2 * (self.problem.hop_us[d] + self.problem.hop_us[CPU])
        made = []
        for kept in (
            [[0] * len(counts)]
            if d == CPU
            else _ways_to_keep(counts, [p.held_bytes[d] if p.allows(d) else None for p in part], self.room[s])
        ):
            away = [(n - k, p) for n, k, p in zip(counts, kept, part, strict=True) if n > k]
            if all(p.allows(CPU) for _, p in away):
                here = sum(k * p.time_us[d] for k, p in zip(kept, part, strict=True) if k) if d != CPU else 0.0
                time = self.homes_us(s) + here + sum(n * (p.time_us[CPU] + hop) for n, p in away)
                made.append((time, homes + sum(n * p.held_bytes[CPU] for n, p in away), kept))
        return [(s, (time, float(held)), kept) for time, held, kept in undominated(made)]

    def _flags(self, s: Segment, flags: int) -> int:
        """What main memory has after a segment: 1, homes of layers; 2, the first item."""
        if self.device(s) != CPU:
            return flags
        layers = any(item.number is not None for item in self.problem.items[s.first : s.past])
        return flags | layers | 2 * (s.first == 0)

    def _shared(self, s: Segment, before: int, after: int) -> int:
        """What main memory holds once: for a moment with its first layer, and what its first and its last item share."""
        passing = self.problem.transient_bytes[CPU] if after & 1 > before & 1 else 0
        tied = bool(self.problem.tied_bytes) and after & 2 and s.past == self.last and self.device(s) == CPU
        return passing - (self.problem.tied_bytes[CPU] if tied else 0)

    def _to_go(self, steps: Mapping[int, Sequence[_Step]], which: int) -> list[dict[Used, float]]:
        """The least time (0), or the least in main memory (1), from each item on, by the devices used before it."""
        states = {self.none_used}
        for kind, devices in enumerate(self.kinds):
            if devices[0] != CPU:
                states |= {(*u[:kind], n, *u[kind + 1 :]) for u in states for n in range(len(devices) + 1)}
        left: list[dict[Used, float]] = [{} for _ in range(self.last + 1)]
        left[self.last] = dict.fromkeys(states, 0.0)
        for first in range(self.last - 1, -1, -1):
            least: dict[tuple[int, int], float] = {}
            for s, costs, _ in steps.get(first, ()):
                key = (s.kind, s.past)
                least[key] = min(costs[which], least.get(key, INFINITE))
            for used in states:
                best = INFINITE
                for (kind, past), cost in least.items():
                    then = self.with_one_more(used, Segment(kind, first, past))
                    if then is not None:
                        best = min(best, cost + left[past].get(then, INFINITE))
                if best < INFINITE:
                    left[first][used] = best
        return left

    def assignment(self, path: _Path) -> Assignment:
        """Of a path, its last step first. Devices of a kind are taken in their order."""
        steps: list[tuple[Segment, Sequence[int]]] = []
        while path:
            path, s, kept = path
            steps.append((s, kept))
        free = [list(devices) for devices in self.kinds]
        homes: list[int] = []
        experts: list[int | None] = []
        for s, kept in reversed(steps):
            d = CPU if self.device(s) == CPU else free[s.kind].pop(0)
            homes += [d] * (s.past - s.first)
            experts += self._experts(s, d, kept)
        return Assignment(tuple(homes), tuple(experts))

    def _experts(self, s: Segment, d: int, kept: Sequence[int]) -> list[int | None]:
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


def _ways_to_keep(counts: Sequence[int], sizes: Sequence[int | None], room: int) -> Iterator[list[int]]:
    """How many of each kind may be kept in so much room; None is the size of what can't be."""
    if not counts:
        yield []
        return
    size = sizes[0]
    most = 0 if size is None else counts[0] if not size else min(counts[0], room // size)
    for count in range(most, -1, -1):
        for others in _ways_to_keep(counts[1:], sizes[1:], room - count * (size or 0)):
            yield [count, *others]


def undominated(ways: Iterable[tuple[float, int, _Kept]]) -> list[tuple[float, int, _Kept]]:
    """Of (time, bytes, ...) those of which none other is better in one and as good in the other, the fastest first."""
    found: list[tuple[float, int, _Kept]] = []
    for way in sorted(ways, key=lambda each: each[:2]):
        if not found or way[1] < found[-1][1]:
            found.append(way)
    return found


def kinds_of(problem: Problem) -> list[list[int]]:
    """Devices in groups of those that differ in their name alone; main memory is one of its own."""
    groups: dict[object, list[int]] = {}
    for d in range(len(problem.devices)):
        columns = tuple(
            (p.held_bytes[d], p.time_us[d], p.host(d)) for i in problem.items for p in (i.home, i.experts) if p is not None
        )
        splits = tuple((s.held_bytes[d], s.time_us[d], s.op_us[d]) for i in problem.items if (s := i.split) is not None)
        guests = any(d in item.guests for item in problem.items)
        key = (problem.room_bytes[d], problem.hop_us[d], problem.transient_bytes[d], problem.fixed_bytes[d], columns, splits)
        groups.setdefault((key, problem.tied_bytes[d : d + 1], d if guests or d == CPU else -1), []).append(d)
    return list(groups.values())


def solve_by_segments(problem: Problem) -> Solution | None:
    """The placement with the least time among those in which each accelerator has one stretch of items; None where none fits."""
    if any(room is not None and fixed > room for room, fixed in zip(problem.room_bytes, problem.fixed_bytes, strict=True)):
        return None
    built = Segments(problem)
    best, room = built.shortest(), problem.room_bytes[CPU]
    if best is not None and room is not None and not fits(problem, best):
        best = built.within(room - problem.fixed_bytes[CPU])
    return None if best is None else Solution(best, proved=True)
