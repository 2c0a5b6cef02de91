"""The best placement where it is known how often each expert is chosen: so many of each layer's, most chosen first, on its card.

As in segments.py a placement is a path of segments. What a segment's experts gain is its own affair: a knapsack in which a layer
takes so many units of the card's room, one for each expert, and gains by a table. The tables would be concave (each further expert
is chosen less) but for two steps: the first expert on the card costs an operation, and the last one saves main memory's and the way
there. Their concave hulls tell in no time what a segment gains at most. The path is looked for by these bounds; the tables of the
segments on it are then solved exactly, by dynamic programming, and the path is looked for again, until the best path has no bound
left in it: then no other is better.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktopt.placing.problem import CPU, INFINITE, Assignment, Item, Problem, Solution, fits, held_bytes, time_us
from ktopt.placing.segments import ENDLESS, Segment, Segments, Used, solve_by_segments

SECONDS = 1.2
"""Of the processor, after which the best path so far is taken."""
NEAR = 1e-9
"""How near to the best a path has to come, relative to it."""


@dataclass(frozen=True, eq=False)
class _Table:
    """What an item's experts gain on a device, in microseconds against main memory, by units of room.

    gain    the most that so many units gain, beside what none gains
    count   how many experts that is: all of them, those of a split, or none
    free    what is gained without room
    """

    gain: Any
    count: Any
    free: float


def solve_by_popularity(problem: Problem) -> Solution | None:
    """As solve_by_segments, where items have a Split; None where nothing fits."""
    if any(room is not None and fixed > room for room, fixed in zip(problem.room_bytes, problem.fixed_bytes, strict=True)):
        return None
    built = _Popular(problem)
    found = built.best()
    if found is not None and fits(problem, found.assignment):
        return found
    room = problem.room_bytes[CPU]
    if room is None:
        return None
    # main memory is what's short: cards filled by popularity, or with whole layers, whichever is better
    whole = solve_by_segments(replace(problem, items=tuple(replace(item, split=None) for item in problem.items)))
    ways = [
        each
        for each in (built.within(room - problem.fixed_bytes[CPU]), None if whole is None else whole.assignment)
        if each is not None
    ]
    ways = [each for each in ways if fits(problem, each)]
    best = min(ways, key=lambda each: time_us(problem, each), default=None)
    return None if best is None else Solution(best, proved=False)


def filled(problem: Problem, assignment: Assignment) -> Assignment:
    """A placement of whole layers whose cards' spare room takes the most chosen experts of their own layers that are in main
    memory."""
    import numpy as np

    held, hot = held_bytes(problem, assignment), [0] * len(problem.items)
    for d, room in enumerate(problem.room_bytes):
        own = [
            i
            for i, item in enumerate(problem.items)
            if assignment.homes[i] == d != CPU and assignment.experts[i] == CPU and item.split is not None and item.split.allows(d)
        ]
        if not own:
            continue
        unit = max(item.split.held_bytes[d] for i in own if (item := problem.items[i]).split is not None)
        tables = [_split_table(problem.items[i], d, np) for i in own]
        left = (ENDLESS if room is None else room) - held[d]
        _, counts = _most_gained(tables, left // max(1, unit), np)
        for i, count in zip(own, counts, strict=True):
            hot[i] = count
    made = replace(assignment, hot=tuple(hot))
    return made if time_us(problem, made) < time_us(problem, assignment) else assignment


def _most_chosen(items: Sequence[Item], d: int, room: int) -> list[int]:
    """How many experts of each item fit, those that gain most first; none of an item that gains nothing by it."""
    found = [0] * len(items)
    steps = []
    for i, item in enumerate(items):
        split = item.split
        assert split is not None
        saved = split.time_us[CPU] - split.time_us[d]
        steps += [(-share * saved, i, split.held_bytes[d]) for share in split.shares[:-1] if share * saved >= 0]
    for _, i, size in sorted(steps):
        if size <= room:
            found[i] += 1
            room -= size
    return [n if n and _split_gain(item, d, n) > 0 else 0 for item, n in zip(items, found, strict=True)]


def _split_table(item: Item, d: int, np: Any) -> _Table:
    """What a layer's experts gain of which one at least is in main memory."""
    assert item.split is not None
    number = len(item.split.shares)
    gain = np.maximum.accumulate([0.0, *(_split_gain(item, d, n) for n in range(1, number))])
    count = np.concatenate([[0], np.where(np.diff(gain) > 0, np.arange(1, number), 0)])
    return _Table(gain, np.maximum.accumulate(count), 0.0)


def _split_gain(item: Item, d: int, count: int) -> float:
    assert item.split is not None
    assert item.experts is not None
    return item.experts.time_us[CPU] - item.split.both_us(d, count)


class _Popular(Segments):
    def __init__(self, problem: Problem) -> None:
        import numpy

        super().__init__(problem)
        self.numpy = numpy
        self.whole_units = True
        self.units = [self._unit(kind[0]) for kind in self.kinds]
        self.tables = [[self._table(kind, item) for item in problem.items] for kind in range(len(self.kinds))]
        self.steep, self.starts = zip(*(self._hulls(kind) for kind in range(len(self.kinds))), strict=True)

    def _unit(self, d: int) -> int:
        """Bytes of room that one expert takes on a device: where they differ, the most."""
        if d == CPU:
            return 1
        sizes = {item.split.held_bytes[d] for item in self.problem.items if item.split is not None and item.split.allows(d)}
        sizes = sizes or {item.experts.held_bytes[d] for item in self.problem.items if item.experts is not None}
        self.whole_units = self.whole_units and len(sizes) <= 1
        return max(1, *sizes)

    def _table(self, kind: int, item: Item) -> _Table | None:
        """None where there is nothing to choose."""
        d, np = self.kinds[kind][0], self.numpy
        if d == CPU or item.experts is None or not item.experts.allows(CPU):
            return None
        split = item.split if item.split is not None and item.split.allows(d) else None
        whole = -(-item.experts.held_bytes[d] // self.units[kind]) if item.experts.allows(d) else 0
        self.whole_units = self.whole_units and not item.experts.held_bytes[d] % self.units[kind] if whole else self.whole_units
        number = len(split.shares) if split is not None else 1
        gain, count = np.full(max(whole, number - 1) + 1, -INFINITE), np.zeros(max(whole, number - 1) + 1, dtype=int)
        gain[0] = 0.0
        if split is not None:
            gain[1:number] = [_split_gain(item, d, n) for n in range(1, number)]
            count[1:number] = np.arange(1, number)
        if item.experts.allows(d):
            hop = 2 * (self.problem.hop_us[d] + self.problem.hop_us[CPU])
            saved = item.experts.time_us[CPU] + hop - item.experts.time_us[d]
            if saved >= gain[whole]:
                gain[whole], count[whole] = saved, number if split is not None else -1
        better = np.maximum.accumulate(gain)
        at = np.maximum.accumulate(np.where(gain >= better, np.arange(len(gain)), 0))
        return _Table(better - better[0], count[at], float(better[0]))

    def _hulls(self, kind: int) -> tuple[Any, list[int]]:
        """What each unit of each item gains by its concave hull, item after item, and where each item's begin."""
        np = self.numpy
        made, starts = [np.zeros(0)], [0]
        for table in self.tables[kind]:
            steps = np.zeros(0) if table is None else np.diff(_hull(table.gain, np))
            made.append(steps)
            starts.append(starts[-1] + len(steps))
        return np.concatenate(made), starts

    def _base(self, s: Segment) -> tuple[float, int] | None:
        """The time of a segment with all experts in main memory that can be there, and what room is left in units; None where
        those that can't be don't fit."""
        d, room, total = self.device(s), self.room[s], self.homes_us(s)
        total -= sum(table.free for table in self.tables[s.kind][s.first : s.past] if table is not None)
        hop = 2 * (self.problem.hop_us[d] + self.problem.hop_us[CPU])
        for item in self.problem.items[s.first : s.past]:
            if item.experts is None:
                continue
            if item.experts.allows(CPU):
                total += item.experts.time_us[CPU] + (hop if d != CPU else 0.0)
            elif d != CPU and item.experts.allows(d):
                total += item.experts.time_us[d]
                room -= item.experts.held_bytes[d]
            else:
                return None
        return None if room < 0 and d != CPU else (total, 0 if d == CPU else room // self.units[s.kind])

    def _bound(self, s: Segment) -> float | None:
        """The least time that a segment may take."""
        base = self._base(s)
        if base is None:
            return None
        starts = self.starts[s.kind]
        steps = self.steep[s.kind][starts[s.first] : starts[s.past]]
        return base[0] - _top(steps, base[1], self.numpy)

    def _exact(self, s: Segment) -> tuple[float, list[int]]:
        """A segment's least time, and how many of each item's experts are on its device: -1 for all of one without a Split."""
        base = self._base(s)
        assert base is not None
        tables = self.tables[s.kind][s.first : s.past]
        counts = [0] * len(tables)
        asked = [(i, table) for i, table in enumerate(tables) if table is not None]
        gained, found = _most_gained([table for _, table in asked], base[1], self.numpy)
        for (i, _), count in zip(asked, found, strict=True):
            counts[i] = count
        return base[0] - gained, counts

    def best(self) -> Solution | None:
        """The best path where main memory holds whatever comes to it."""
        times: dict[Segment, float] = {s: bound for s in self.room if (bound := self._bound(s)) is not None}
        known: dict[Segment, list[int]] = {}
        best: tuple[float, list[Segment]] | None = None
        start = time.process_time()
        while (found := self._path(times)) is not None:
            for s in found[1]:
                if s not in known:
                    times[s], known[s] = self._exact(s)
            total = sum(times[s] for s in found[1])
            if best is None or total < best[0]:
                best = total, found[1]
            sure = best[0] <= found[0] + NEAR * abs(found[0])
            if sure or time.process_time() - start > SECONDS:
                counts = [(s, known[s]) for s in best[1]]
                return Solution(self._assigned(counts), proved=sure and self.whole_units)
        return None

    def _path(self, times: dict[Segment, float]) -> tuple[float, list[Segment]] | None:
        """The path of least time, by these times of segments."""
        reached: list[dict[Used, tuple[float, Any]]] = [{} for _ in range(self.last + 1)]
        reached[0][self.none_used] = (0.0, ())
        steps: dict[int, list[tuple[Segment, float]]] = {}
        for s, took in times.items():
            steps.setdefault(s.first, []).append((s, took))
        for first in range(self.last):
            for used, (so_far, path) in reached[first].items():
                for s, took in steps.get(first, ()):
                    then = self.with_one_more(used, s)
                    before = reached[s.past].get(then) if then is not None else None
                    if then is not None and (before is None or so_far + took < before[0]):
                        reached[s.past][then] = (so_far + took, (path, s))
        if not reached[self.last]:
            return None
        total, path = min(reached[self.last].values(), key=lambda each: each[0])
        found: list[Segment] = []
        while path:
            path, s = path
            found.append(s)
        return total, found[::-1]

    def _steps(self, s: Segment) -> list[tuple[Segment, tuple[float, float], list[int]]]:
        """One way in which a segment fills its card: with the experts chosen most of all of its layers."""
        base = self._base(s)
        if base is None:
            return []
        d, items = self.device(s), self.problem.items[s.first : s.past]
        held = self.homes_in_memory(s)
        own = [i for i, item in enumerate(items) if d != CPU and item.split is not None and item.split.allows(d)]
        found, counts = _most_chosen([items[i] for i in own], d, base[1] * self.units[s.kind]), [0] * len(items)
        gained = 0.0
        for i, count in zip(own, found, strict=True):
            counts[i] = count
            gained += _split_gain(items[i], d, count) if count else 0.0
        for item, count in zip(items, counts, strict=True):
            if item.experts is not None and item.experts.allows(CPU):
                split = item.split if count else None
                rest = None if split is None else (len(split.shares) - count) * split.held_bytes[CPU]
                held += item.experts.held_bytes[CPU] if rest is None else rest
        return [(s, (base[0] - gained, float(held)), counts)]

    def assignment(self, path: Any) -> Assignment:
        steps: list[tuple[Segment, Sequence[int]]] = []
        while path:
            path, s, counts = path
            steps.append((s, counts))
        return self._assigned(steps[::-1])

    def _assigned(self, steps: Sequence[tuple[Segment, Sequence[int]]]) -> Assignment:
        """Devices of a kind are taken in their order."""
        free = [list(devices) for devices in self.kinds]
        homes: list[int] = []
        experts: list[int | None] = []
        hot: list[int] = []
        for s, counts in steps:
            d = CPU if self.device(s) == CPU else free[s.kind].pop(0)
            for item, count in zip(self.problem.items[s.first : s.past], counts, strict=True):
                number = len(item.split.shares) if item.split is not None else 0
                must = item.experts is not None and not item.experts.allows(CPU)
                whole = d != CPU and (must or count == -1 or (0 < number == count))
                homes.append(d)
                experts.append(None if item.experts is None else d if whole else CPU)
                hot.append(0 if whole else count)
        return Assignment(tuple(homes), tuple(experts), tuple(hot) if any(hot) else ())


def _most_gained(tables: Sequence[_Table], room: int, np: Any) -> tuple[float, list[int]]:
    """The most that tables gain together in so many units, and how many experts each then has: by dynamic programming."""
    room = min(room, sum(len(table.gain) - 1 for table in tables))
    best, picks = np.zeros(room + 1), list[Any]()
    for gain, worth in _worth(tables, room, np):
        new, pick = best.copy(), np.zeros(room + 1, dtype=int)
        for units in worth:
            sums = best[: room + 1 - units] + gain[units]
            better = sums > new[units:]
            new[units:][better] = sums[better]
            pick[units:][better] = units
        best = new
        picks.append(pick)
    counts, left = list[int](), room
    for table, pick in zip(reversed(tables), reversed(picks), strict=True):
        counts.append(int(table.count[pick[left]]))
        left -= int(pick[left])
    return float(best[room]), counts[::-1]


def _worth(tables: Sequence[_Table], room: int, np: Any) -> Iterator[tuple[Any, list[int]]]:
    """Each table's gains, and of its units those that may be part of the best: at the price that a unit is worth, they lose no more
    than is between the bound and what whole steps of the hulls gain."""
    steps = np.concatenate([np.zeros(0), *(np.diff(_hull(table.gain, np)) for table in tables)])
    price = 0.0 if room >= len(steps) or not room else float(np.partition(steps, len(steps) - room)[len(steps) - room])
    reduced = [table.gain - price * np.arange(len(table.gain)) for table in tables]
    near = [NEAR * max(1.0, abs(float(each.max()))) for each in reduced]
    taken = sum(int(np.flatnonzero(each >= each.max() - off)[0]) for each, off in zip(reduced, near, strict=True))
    gap = price * (room - taken) if taken <= room else INFINITE
    for table, each, off in zip(tables, reduced, near, strict=True):
        enough = each >= each.max() - gap - off
        enough &= np.append(True, table.gain[1:] > table.gain[:-1])  # fewer units that gain the same stand for the others
        yield table.gain, [units for units in np.flatnonzero(enough).tolist() if 0 < units <= room]


def _hull(gain: Any, np: Any) -> Any:
    """The least concave function that is nowhere below a table."""
    corners: list[int] = []
    for at, value in enumerate(gain.tolist()):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (gain[b] - gain[a]) * (at - a) > (value - gain[a]) * (b - a):
                break
            corners.pop()
        corners.append(at)
    return np.interp(np.arange(len(gain)), corners, gain[corners])


def _top(steps: Any, room: int, np: Any) -> float:
    """The sum of so many of the greatest."""
    if room >= len(steps):
        return float(steps.sum())
    return float(np.partition(steps, len(steps) - room)[len(steps) - room :].sum()) if room > 0 else 0.0
