"""Why no placement fits: what is needed and what there is, the largest items, and what would help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from ktopt.cache.blocks.memory import in_words
from ktopt.placing.problem import INFINITE, Item, Part, Problem, held_bytes
from ktopt.placing.solve import solve
from ktopt.placing.units import RESERVED_SHARE, Case
from ktopt.working_memory.remedies import FEWER_BITS, largest_groups, listed

LEAST_CONTEXT = 512


def why_nothing_fits(case: Case, machine: str, smaller: Callable[[int], Case], lines: bool = False) -> tuple[str, str]:
    """A message and what would help. `smaller` makes the case of another context; `lines`: the file has some of `place:`."""
    problem = case.problem
    if nowhere := [item.label for item in problem.items for part in _parts(item) if min(part.time_us) == INFINITE]:
        return (
            f"{nowhere[0]} can be on no device of {machine}: its rules name ops and operators that none of them runs"
            + (f"; nor can {len(nowhere) - 1} more" if len(nowhere) > 1 else ""),
            "leave `generate_op` out, and the best op for the device is taken",
        )
    least = sum(min(_allowed(part)) for item in problem.items for part in _parts(item)) + sum(problem.fixed_bytes)
    have = _rooms(problem)
    needed = f"weights and cache for {case.context:,} tokens take {in_words(least)} at least"
    if over := _overfilled(problem):
        needed = f"what the file pins to {over[0]} takes {in_words(over[1])}"
    return f"nothing fits on {machine}: {needed}, and there is {have or 'nothing'}", _help(case, smaller, lines)


def _rooms(problem: Problem) -> str:
    """What each device has room for; cards in a row that have the same are said together."""
    found: list[str] = []
    rooms = zip(problem.devices, problem.room_bytes, strict=True)
    for room, same in groupby(rooms, key=lambda pair: pair[1]):
        names = [name for name, _ in same]
        if room:
            found.append(f"{names[0]} {in_words(room)}" if len(names) == 1 else f"{names[0]} to {names[-1]} {in_words(room)} each")
    return ", ".join(found)


def _parts(item: Item) -> list[Part]:
    return [item.home] if item.experts is None else [item.home, item.experts]


def _allowed(part: Part) -> list[int]:
    return [held for held, time in zip(part.held_bytes, part.time_us, strict=True) if time != INFINITE]


def _kept_by_ops(case: Case) -> bool:
    """Whether modules that nothing pins can't be on every device."""
    free = zip(case.problem.items, case.homes, case.experts, strict=True)
    return any(
        (home and INFINITE in item.home.time_us) or (experts and item.experts is not None and INFINITE in item.experts.time_us)
        for item, home, experts in free
    )


def _overfilled(problem: Problem) -> tuple[str, int] | None:
    """A device that what is pinned to it alone overfills, and the bytes of that."""
    for d, room in enumerate(problem.room_bytes):
        pinned = problem.fixed_bytes[d] + sum(
            part.held_bytes[d]
            for item in problem.items
            for part in _parts(item)
            if part.allows(d) and len(_allowed(part)) == 1 < len(problem.devices)
        )
        if room is not None and pinned > room:
            return problem.devices[d], pinned
    return None


def _help(case: Case, smaller: Callable[[int], Case], lines: bool) -> str:
    steps = case.plans[min(1, len(case.plans) - 1)].steps  # as they are on the first accelerator, or in main memory
    said = [f"the largest items are {listed(largest_groups((step.path, step.weight_bytes) for step in steps))}"]
    problem = case.problem
    context = case.context // 2
    while context >= LEAST_CONTEXT:
        if solve(smaller(context).problem) is not None:
            said.append(f"a context of {context:,} tokens fits (--context {context})")
            break
        context //= 2
    endless = replace(problem, room_bytes=(None, *problem.room_bytes[1:]))
    if problem.room_bytes[0] is not None and (more := solve(endless)) is not None:
        needed = int(held_bytes(problem, more.assignment)[0] / (1 - RESERVED_SHARE))
        said.append(f"with {in_words(needed)} of main memory it fits")
    if lines:
        said.append("what `place:` says stays: `ktopt place --anew` leaves its lines out")
    if _kept_by_ops(case):
        said.append(
            "an op that a rule names keeps its modules where it runs: without `generate_op` the best one for each device is taken"
        )
    if not any(step.stored for plan in case.plans for step in plan.steps):
        said.append(FEWER_BITS)
    return "; ".join(said)
