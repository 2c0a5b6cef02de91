"""What selectors ask beside a tree and its config: the machine, and how weights are stored. Either may not be known.

What isn't known can be supposed: `branches` gives the cases that make a difference to some selectors, so that all of them can be
looked at where the real one can't.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product
from typing import Any

from ktopt.placement import Hardware
from ktopt.selector.expression import AnyOf, Equal, Expression, Matches, Order, Range, Unequal, walk
from ktopt.selector.fields import UNKNOWN, Test, about_machine, about_storage, holds, machine_value

Storage = Mapping[str, tuple[str, ...]]
"""Full parameter names to the types that their parts are stored in, such as ("Q4_K",)."""

MOST_BRANCHES = 12
MOST_BOUNDS = 8
"""Numbers of one field whose neighbours are tried."""


@dataclass(frozen=True)
class Surroundings:
    """What is known. `supposed` gives values for what isn't, by field: of hw.KEY its value, of quant whether tests of it hold."""

    hardware: Hardware | None = None
    storage: Storage | None = None
    supposed: Mapping[str, Any] = field(default_factory=dict)

    def machine(self, key: str) -> Any:
        """A field of the machine, known or supposed; UNKNOWN otherwise."""
        value = machine_value(self.hardware, key)
        return self.supposed.get(f"hw.{key}", UNKNOWN) if value is UNKNOWN else value

    @property
    def storage_supposed(self) -> bool:
        """Whether storage types are not known and every test of them is taken to hold."""
        return self.storage is None and bool(self.supposed.get("quant"))

    def lacks(self, name: str) -> bool:
        """Whether a selector's field asks for what is neither known nor supposed."""
        if about_storage(name):
            return self.storage is None and name not in self.supposed
        return about_machine(name) and self.machine(name.removeprefix("hw.")) is UNKNOWN


NOTHING = Surroundings()


def tests_of(expressions: Iterable[Expression]) -> dict[Test, None]:
    """The distinct comparisons in some expressions, in order."""
    nodes = walk(AnyOf(tuple(expressions)))
    return {node: None for node in nodes if isinstance(node, Equal | Unequal | Matches | Order)}


def branches(expressions: Iterable[Expression], known: Surroundings) -> list[Surroundings]:
    """The cases of what is not known that make a difference to these expressions: every one where they are few, otherwise the
    extremes and each expression's own. Empty where all is known."""
    expressions = list(expressions)
    tests = [test for test in tests_of(expressions) if known.lacks(test.field)]
    values = {name: _values(name, [t for t in tests if t.field == name]) for name in dict.fromkeys(t.field for t in tests)}
    if not values:
        return []
    low, high = ({name: tried[end] for name, tried in values.items()} for end in (0, -1))
    own = (_combined(values, {t.field for t in tests_of([e])}) for e in expressions)
    some = chain([low, high], ({**low, **case} for cases in own for case in islice(cases, MOST_BRANCHES)))
    count = 1
    for tried in values.values():
        count *= len(tried)
    cases = _combined(values, set(values)) if count <= MOST_BRANCHES else some
    distinct = {tuple(case.items()): case for case in islice(cases, 10 * MOST_BRANCHES)}
    return [replace(known, supposed={**known.supposed, **case}) for case in islice(distinct.values(), MOST_BRANCHES)]


def _combined(values: Mapping[str, list[Any]], names: set[str]) -> Iterator[dict[str, Any]]:
    """Every combination of the values of these fields."""
    chosen = [name for name in values if name in names]
    return (dict(zip(chosen, combination, strict=True)) for combination in product(*(values[name] for name in chosen)))


def _values(name: str, tests: list[Test]) -> list[Any]:
    """Values of a field of which no two pass the same tests; the lowest first."""
    if about_storage(name) or name.startswith("hw.cpu."):
        return [False, True]
    bounds: dict[float, None] = {}
    for test in tests:
        bounds.update(dict.fromkeys(_bounds(test)))
        if len(bounds) >= MOST_BOUNDS:
            break
    tried = sorted({value for bound in bounds for value in (bound - 1, bound, bound + 1) if value >= 0}) or [0]
    return list({tuple(holds(test, [value]) for test in tests): value for value in reversed(tried)}.values())[::-1]


def _bounds(test: Test) -> list[float]:
    """The numbers at which a test changes its mind."""
    if isinstance(test, Order):
        return [test.bound]
    found: list[float] = []
    for value in test.values if isinstance(test, Equal) else (test.value,) if isinstance(test, Unequal) else ():
        ends = (value.first, value.last) if isinstance(value, Range) else (_number(value),)
        found += [end for end in ends if end is not None]
    return found


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value == int(value) else value


def describe(tests: Iterable[Test], around: Surroundings, most: int = 3) -> str:
    """Which tests of the machine hold in a case: "hw.cuda_sm >= 80 holds"."""
    asked = [test for test in tests if about_machine(test.field) and test.field in around.supposed]
    words = [f"{t} {'holds' if holds(t, [around.supposed[t.field]]) else 'does not hold'}" for t in asked[:most]]
    return " and ".join(words)
