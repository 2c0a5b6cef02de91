"""The solver of placements against every placement there is, on small problems."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktopt.placing.problem import CPU, INFINITE, Assignment, Item, Part, Problem, Split, fits, time_us
from ktopt.placing.segments import solve_by_segments
from ktopt.placing.solve import solve, solve_by_runs

GIB = 1 << 30

DEVICES = 3
_sizes = st.integers(0, 6).map(lambda units: int(units * GIB / 4))
_times = st.one_of(st.integers(1, 40).map(float), st.just(INFINITE))


def by_device(values: st.SearchStrategy) -> st.SearchStrategy:  # type: ignore[type-arg]
    return st.tuples(*[values] * DEVICES)


parts = st.builds(Part, by_device(_sizes), by_device(_times))
kept_in_memory = by_device(st.sampled_from([0, 0, GIB // 4, GIB])).map(lambda host: (0, *host[1:]))
homes = st.builds(Part, by_device(_sizes), by_device(_times), st.one_of(st.just(()), kept_in_memory))
guests = st.sampled_from([(), (), (0,), (1, 2)])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kinds = [
        Item(draw(homes), draw(st.one_of(st.none(), parts)), draw(guests)),
        Item(draw(homes), draw(st.one_of(st.none(), parts)), draw(guests)),
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
        host = p and p.host_bytes and (0, p.host_bytes[1], p.host_bytes[1])
        return p and Part((*p.held_bytes[:2], p.held_bytes[1]), (*p.time_us[:2], p.time_us[1]), host or ())

    return Item(part(item.home) or item.home, part(item.experts), (), number=item.number)


def best_of_all(problem: Problem) -> float:
    """The least time of all placements that fit, by looking at each."""
    choices = []
    for item in problem.items:
        experts = [(None, 0)] if item.experts is None else [(d, 0) for d in range(DEVICES)]
        experts += [(CPU, hot) for hot in range(1, len(item.split.shares))] if item.split is not None else []
        choices += [range(DEVICES), experts]
    found = INFINITE
    for each in itertools.product(*choices):
        where = each[1::2]
        assignment = Assignment(tuple(each[::2]), tuple(d for d, _ in where), tuple(hot for _, hot in where))
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


@st.composite
def split_problems(draw: st.DrawFn) -> Problem:
    """Problems whose layers' experts may be split, each chosen more or less often."""
    problem = replace(draw(problems()), pinned=())
    unit = draw(by_device(st.integers(1, 3).map(lambda units: int(units * GIB / 4))))
    items = []
    for item in problem.items:
        if item.experts is not None and item.number is not None:
            shares = sorted(draw(st.lists(st.integers(0, 9), min_size=2, max_size=4)), reverse=True)
            total = sum(shares) or 1
            shares = [share / total for share in shares] if sum(shares) else [1.0, *[0.0] * (len(shares) - 1)]
            times, ops = draw(by_device(st.integers(1, 40).map(float))), draw(by_device(st.integers(0, 3).map(float)))
            whole = tuple(INFINITE if t == INFINITE else ops[d] + times[d] for d, t in enumerate(item.experts.time_us))
            part = Part(tuple(len(shares) * size for size in unit), whole)
            item = replace(item, experts=part, split=Split(tuple(shares), unit, times, ops))
        items.append(item)
    return replace(problem, items=tuple(items))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(split_problems())
def test_no_split_of_a_small_problem_is_better_than_the_solvers(problem: Problem) -> None:
    least, solution = best_of_all(problem), solve(problem)
    if solution is None:
        assert least == INFINITE
        return
    assert fits(problem, solution.assignment)
    found = time_us(problem, solution.assignment)
    if solution.proved:
        assert found == pytest.approx(least)
        return
    whole = solve(replace(problem, items=tuple(replace(item, split=None) for item in problem.items)))
    assert whole is None or found <= time_us(problem, whole.assignment) * (1 + 1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(split_problems())
def test_with_pins_a_split_is_no_worse_than_whole_layers(problem: Problem) -> None:
    pinned = replace(problem, pinned=(1,))
    whole = solve(replace(pinned, items=tuple(replace(item, split=None) for item in pinned.items)))
    solution = solve(pinned)
    assert (solution is None) == (whole is None)
    if solution is not None and whole is not None:
        assert fits(pinned, solution.assignment)
        assert time_us(pinned, solution.assignment) <= time_us(pinned, whole.assignment) * (1 + 1e-9)
