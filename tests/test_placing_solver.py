"""The solver of placements against every placement there is, on small problems."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktopt.placing.problem import INFINITE, Assignment, Item, Part, Problem, fits, time_us
from ktopt.placing.segments import solve_by_segments
from ktopt.placing.solve import solve, solve_by_runs

GIB = 1 << 30

DEVICES = 3
_sizes = st.integers(0, 6).map(lambda units: int(units * GIB / 4))
_times = st.one_of(st.integers(1, 40).map(float), st.just(INFINITE))


def by_device(values: st.SearchStrategy) -> st.SearchStrategy:  # type: ignore[type-arg]
    return st.tuples(*[values] * DEVICES)


parts = st.builds(Part, by_device(_sizes), by_device(_times))
guests = st.sampled_from([(), (), (0,), (1, 2)])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kinds = [
        Item(draw(parts), draw(st.one_of(st.none(), parts)), draw(guests)),
        Item(draw(parts), draw(st.one_of(st.none(), parts)), draw(guests)),
    ]
    order = draw(st.lists(st.integers(0, 1), min_size=1, max_size=2))
    layers = [Item(kinds[k].home, kinds[k].experts, kinds[k].guests, number=n) for n, k in enumerate(order)]
    alike = draw(st.booleans())
    if alike:  # devices 1 and 2 differ in nothing
        layers = [_alike(item) for item in layers]
    start, end = Item(draw(parts)), Item(draw(parts))
    start, end = (_alike(start), _alike(end)) if alike else (start, end)

    def pair(values: tuple) -> tuple:  # type: ignore[type-arg]
        return (values[0], values[1], values[1]) if alike else values

    return Problem(
        devices=("cpu", "cuda:0", "cuda:1"),
        room_bytes=pair(draw(by_device(st.one_of(st.none(), st.integers(0, 16).map(lambda u: int(u * GIB / 4)))))),
        hop_us=pair(draw(by_device(st.integers(0, 9).map(float)))),
        transient_bytes=pair(draw(by_device(_sizes))),
        items=(start, *layers, end),
        fixed_bytes=pair(draw(by_device(_sizes))),
        fixed_us=draw(st.integers(0, 5).map(float)),
        tied_bytes=draw(st.sampled_from([(), (0, int(GIB / 4), int(GIB / 4))])),
        pinned=draw(st.sampled_from([(), (), (1,), (1, 2)])),
    )


def _alike(item: Item) -> Item:
    def part(p: Part | None) -> Part | None:
        return p and Part((*p.held_bytes[:2], p.held_bytes[1]), (*p.time_us[:2], p.time_us[1]))

    return Item(part(item.home) or item.home, part(item.experts), (), number=item.number)


def best_of_all(problem: Problem) -> float:
    """The least time of all placements that fit, by looking at each."""
    choices = []
    for item in problem.items:
        choices.append(range(DEVICES))
        choices.append([None] if item.experts is None else range(DEVICES))
    found = INFINITE
    for each in itertools.product(*choices):
        assignment = Assignment(tuple(each[::2]), tuple(each[1::2]))
        if fits(problem, assignment):
            found = min(found, time_us(problem, assignment))
    return found


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems())
def test_no_placement_of_a_small_problem_is_better_than_the_solvers(problem: Problem) -> None:
    least = best_of_all(problem)
    for solved in (solve, solve_by_runs, solve_by_segments):
        if problem.pinned and solved is solve_by_segments:
            continue
        if any(r is not None and f > r for r, f in zip(problem.room_bytes, problem.fixed_bytes, strict=True)):
            assert solve(problem) is None
            continue
        solution = solved(problem)
        if solution is None:
            assert least == INFINITE
            continue
        assert fits(problem, solution.assignment)
        assert time_us(problem, solution.assignment) == pytest.approx(least)
