"""The named selectors of a native file's `let`, and what is wrong with how they name each other.

A name may be used below the line that gives it. One that can't be read is remembered, so that what uses it isn't reported as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ktopt.source import Node, Scalar
from ktopt.validate.shape import Shape

if TYPE_CHECKING:
    from ktopt.selector import Selector

_REF = re.compile(r"\$(\w+)")
Entries = Sequence[tuple[Scalar, Node]]
SHOWN = 6
"""How many names of a cycle a message lists."""


class Lets(dict[str, "Selector"]):
    """What `$name` stands for, and the names that stand for nothing because of an error that is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: set[str] = set()

    def add_imported(self, other: Lets) -> None:
        self.update(other)
        self.wrong |= other.wrong

    def uses_wrong(self, text: str) -> bool:
        """Whether a selector names one that couldn't be read."""
        return bool(self.wrong) and not self.wrong.isdisjoint(_REF.findall(text))


def check_order(shape: Shape, entries: Entries, lets: Lets) -> None:
    """KT310 for each cycle of names, and one for all that are used above the line that gives them. `lets` has what is imported."""
    lets.wrong.difference_update(str(key.value) for key, _ in entries)
    places = {str(key.value): i for i, (key, _) in enumerate(entries)}
    uses = [
        {places[r]: None for r in _REF.findall(str(node.value)) if r in places and not (r in lets and places[r] >= i)}
        if isinstance(node, Scalar)
        else {}
        for i, (_, node) in enumerate(entries)
    ]
    upwards = {i for i, used in enumerate(uses) if any(j >= i for j in used)}
    if not upwards:
        return
    names = list(places)
    cyclic: set[int] = set()
    for cycle in _cycles([list(used) for used in uses]):
        cyclic.update(cycle)
        shown = [names[i] for i in (*cycle[:SHOWN], cycle[0])]
        if len(cycle) > SHOWN:
            shown[-1:-1] = ["..."]
        key = entries[min(cycle)][0]
        shape.error(
            "KT310", f"these names go in a cycle: {' -> '.join(shown)}", key, help="write out one of them without the others"
        )
    early = sorted(upwards - cyclic)
    if early:
        first = early[0]
        later = names[next(j for j in uses[first] if j >= first)]
        more = f"; {len(early) - 1} more use a name too early" if len(early) > 1 else ""
        message = f"{names[first]} uses ${later}, which is given further down{more}"
        shape.error("KT310", message, entries[first][1], help="a `let` may use those above it")
    lets.wrong.update(names[i] for i in upwards)


def _cycles(uses: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """A cycle for each way back that a walk along the uses finds, each as the places on it."""
    done: set[int] = set()
    for start in range(len(uses)):
        path: list[int] = []
        on_path: dict[int, int] = {}
        stack = [(start, iter(uses[start]))] if start not in done else []
        while stack:
            at, rest = stack[-1]
            if at not in on_path:
                on_path[at] = len(path)
                path.append(at)
            following = next(rest, None)
            if following is None:
                stack.pop()
                path.pop()
                del on_path[at]
                done.add(at)
            elif following in on_path:
                yield path[on_path[following] :]
            elif following not in done:
                stack.append((following, iter(uses[following])))
