"""The best placement: where nothing is pinned to an accelerator, a path (segments.py, and popular.py where it is known how often
each expert is chosen); else by mixed-integer programming, HiGHS through scipy.

Layers in a row that are alike are counted, not numbered. For a run r of them and a device d:

    n  how many homes are there           m  how many layers' experts are
    s  how many have both there           u  whether any home is
    j  whether the run ends on d and the next one begins there

A run passes each of its devices once. Each device of a run then costs two half hops, less where a run goes on where the one before
it ended, and less at the two ends of all. So j may be 1 where both runs use d, for one d, and a run that begins and ends on one
device has no other. Experts away from their home cost a hop and a hop back, half of it counted at each device:
n - s, and m - s. Layers are given their numbers only afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from ktopt.placing.popular import filled, solve_by_popularity
from ktopt.placing.problem import CPU, Assignment, Problem, Solution, runs_of
from ktopt.placing.program import MIB, Program, Term, Values
from ktopt.placing.segments import kinds_of, solve_by_segments


def solve(problem: Problem) -> Solution | None:
    """The placement with the least time among those that fit, in which an accelerator to which nothing is pinned has one stretch of
    items; None where none fits. KtoptError without scipy, or where the solver found nothing in its time."""
    splits = any(item.split is not None for item in problem.items)
    if splits and not problem.pinned:
        found = solve_by_popularity(problem)
    else:
        found = solve_by_runs(problem) if problem.pinned else solve_by_segments(problem)
    if found is None:
        return None
    made = _tidied(problem, found.assignment)
    if splits and problem.pinned:
        return Solution(filled(problem, made), proved=False)
    return replace(found, assignment=made)


def _tidied(problem: Problem, assignment: Assignment) -> Assignment:
    """A placement that costs the same and reads better: of devices that are alike, the first ones come first; and of stretches of
    items one after another, the first has the experts that aren't at home last, the next one first, and so on."""
    names = list(range(len(problem.devices)))
    for group in kinds_of(problem):
        if set(group).isdisjoint(problem.pinned):
            used = [d for d in dict.fromkeys(assignment.homes) if d in group]
            for new, old in zip(group, [*used, *(d for d in group if d not in used)], strict=True):
                names[old] = new
    homes = tuple(names[d] for d in assignment.homes)
    experts = [None if d is None else names[d] for d in assignment.experts]
    if any(item.split is not None for item in problem.items):
        return Assignment(homes, tuple(experts), assignment.hot)
    starts = [i for i, d in enumerate(homes) if not i or homes[i - 1] != d]
    turned = False
    for first, past in zip(starts, [*starts[1:], len(homes)], strict=True):
        kinds = dict.fromkeys(item.experts for item in problem.items[first:past] if item.experts is not None)
        for kind in kinds:
            places = [i for i in range(first, past) if problem.items[i].experts == kind]
            ordered = sorted((experts[i] for i in places), key=lambda d: (d != homes[first]) != turned)
            for i, d in zip(places, ordered, strict=True):
                experts[i] = d
        turned = turned != any(experts[i] not in (None, homes[first]) for i in range(first, past))
    return Assignment(homes, tuple(experts))


def solve_by_runs(problem: Problem) -> Solution | None:
    """As `solve`, with pins. Runs of layers that are alike are counted, not numbered."""
    runs = runs_of(problem.items)
    found = _program(problem, runs).solved()
    return None if found is None else Solution(_numbered(problem, runs, found[0]), found[1])


def _program(problem: Problem, runs: Sequence[tuple[int, int]]) -> Program:
    made, devices = Program(), range(len(problem.devices))
    for r, (first, past) in enumerate(runs):
        item, length = problem.items[first], past - first
        for d in devices:
            away = sum(2 * (problem.hop_us[d] + problem.hop_us[guest]) for guest in item.guests if guest != d)
            half = 2 * problem.hop_us[d]
            may = item.home.allows(d)
            made.variable(("n", r, d), length * may, (item.home.time_us[d] + away if may else 0.0))
            made.variable(("u", r, d), float(may), half)
            made.row([(("n", r, d), 1), (("u", r, d), -length)], -length, 0)
            made.row([(("n", r, d), 1), (("u", r, d), -1)], 0, length)
            if item.experts is not None:
                may = item.experts.allows(d)
                made.variable(("m", r, d), length * may, (item.experts.time_us[d] if may else 0.0) + half)
                made.variable(("s", r, d), length * may, -2 * half)
                made.add(("n", r, d), half)
                made.row([(("s", r, d), 1), (("n", r, d), -1)], -length, 0)
                made.row([(("s", r, d), 1), (("m", r, d), -1)], -length, 0)
                if d not in (CPU, *problem.pinned):  # its experts are there as homes are
                    made.row([(("s", r, d), 1), (("m", r, d), -1)], 0, 0)
        made.row([(("n", r, d), 1) for d in devices], length, length)
        if item.experts is not None:
            made.row([(("m", r, d), 1) for d in devices], length, length)
    _joins(problem, runs, made)
    _room(problem, runs, made)
    _visits(problem, runs, made)
    _order_of_alike(problem, runs, made)
    return made


def _joins(problem: Problem, runs: Sequence[tuple[int, int]], made: Program) -> None:
    """Where a run goes on where the one before it ended. The two ends of all are joined to nothing, at half a hop each."""
    devices, last = range(len(problem.devices)), len(runs) - 1
    for r in range(-1, last + 1):
        for d in devices:
            made.variable(("j", r, d), 1, -(problem.hop_us[d] if r in (-1, last) else 2 * problem.hop_us[d]))
            if r >= 0:
                made.row([(("j", r, d), 1), (("u", r, d), -1)], -1, 0)
            if r < last:
                made.row([(("j", r, d), 1), (("u", r + 1, d), -1)], -1, 0)
        made.row([(("j", r, d), 1) for d in devices], 0, 1)
    for r, (first, past) in enumerate(runs):
        for d in devices if past - first > 1 else ():
            others = [(("u", r, other), 1.0) for other in devices if other != d]
            for other in others:
                made.row([(("j", r - 1, d), 1), (("j", r, d), 1), other], 0, 2)


def _room(problem: Problem, runs: Sequence[tuple[int, int]], made: Program) -> None:
    last = len(runs) - 1
    for d, room in enumerate(problem.room_bytes):
        terms: list[Term] = []
        for r, (first, _) in enumerate(runs):
            item = problem.items[first]
            terms.append((("n", r, d), item.home.held_bytes[d] / MIB))
            if item.experts is not None:
                terms.append((("m", r, d), item.experts.held_bytes[d] / MIB))
            if d == CPU:
                terms += [
                    (("n", r, other), item.home.host(other) / MIB) for other in range(len(problem.devices)) if item.home.host(other)
                ]
        made.variable(("has", d), 1)
        terms.append((("has", d), problem.transient_bytes[d] / MIB))
        for r, (first, _) in enumerate(runs):
            if problem.items[first].number is not None:
                made.row([(("has", d), 1), (("u", r, d), -1)], 0, 1)
        if problem.tied_bytes:
            made.variable(("tied", d), 1)
            made.row([(("tied", d), 1), (("u", 0, d), -1)], -1, 0)
            made.row([(("tied", d), 1), (("u", last, d), -1)], -1, 0)
            terms.append((("tied", d), -problem.tied_bytes[d] / MIB))
        if room is not None:
            made.row(terms, -float("inf"), (room - problem.fixed_bytes[d]) / MIB)


def _visits(problem: Problem, runs: Sequence[tuple[int, int]], made: Program) -> None:
    """What follows from the rest, said so that the solver's bounds are near: a device that is used at all is come to at least once,
    and a device that isn't used holds no home."""
    for d, room in enumerate(problem.room_bytes):
        made.variable(("used", d), 1)
        come: list[Term] = [(("used", d), -1)]
        for r in range(len(runs)):
            made.row([(("used", d), 1), (("u", r, d), -1)], 0, 1)
            come += [(("u", r, d), 1), *([(("j", r, d), -1.0)] if r < len(runs) - 1 else [])]
        made.row(come, 0, 0 if d not in (CPU, *problem.pinned) else float("inf"))
        if room is not None:
            held: list[Term] = [(("used", d), -max(0, room - problem.fixed_bytes[d]) / MIB)]
            for r, (first, _) in enumerate(runs):
                item = problem.items[first]
                held.append((("n", r, d), item.home.held_bytes[d] / MIB))
                if item.experts is not None:
                    held.append((("s", r, d), item.experts.held_bytes[d] / MIB))
            held += [(("tied", d), -problem.tied_bytes[d] / MIB)] if problem.tied_bytes else []
            held.append((("has", d), problem.transient_bytes[d] / MIB))
            made.row(held, -float("inf"), 0)


def _order_of_alike(problem: Problem, runs: Sequence[tuple[int, int]], made: Program) -> None:
    """Devices that are alike hold no more of the longest run than the one before them: any placement can be renamed to one that
    does, and the solver needn't look at the others."""
    longest = max(range(len(runs)), key=lambda r: runs[r][1] - runs[r][0])
    for group in (kind for kind in kinds_of(problem) if not set(kind) & set(problem.pinned)):
        for before, after in pairwise(group):
            made.row([(("n", longest, before), 1), (("n", longest, after), -1)], 0, float("inf"))


def _numbered(problem: Problem, runs: Sequence[tuple[int, int]], counts: Values) -> Assignment:
    """Layers with numbers: a run passes its devices in order, but begins and ends where it is joined to the runs beside it. Of a
    device's layers the first ones have their experts there."""
    devices = range(len(problem.devices))
    homes: list[int] = []
    experts: list[int | None] = []
    for r, (first, past) in enumerate(runs):
        begins = [d for d in devices if r and counts["j", r - 1, d]]
        ends = [d for d in devices if r < len(runs) - 1 and counts["j", r, d] and d not in begins]
        used = [d for d in devices if counts["n", r, d]]
        middle = [d for d in used if d not in (*begins, *ends)]
        here = [d for d in (*begins, *middle, *ends) if d in used for _ in range(counts["n", r, d])]
        homes += here
        experts += _experts(devices, r, here, counts) if problem.items[first].experts is not None else [None] * (past - first)
    return Assignment(tuple(homes), tuple(experts))


def _experts(devices: Iterable[int], r: int, homes: Sequence[int], counts: Values) -> list[int | None]:
    """Experts at home as many as can be; the others on the devices that have more of them than homes, in order."""
    at_home = {d: min(counts["n", r, d], counts["m", r, d]) for d in devices}
    left = [d for d in devices for _ in range(counts["m", r, d] - at_home[d])]
    found: list[int | None] = []
    for home in homes:
        if at_home[home]:
            at_home[home] -= 1
            found.append(home)
        else:
            found.append(left.pop(0))
    return found
