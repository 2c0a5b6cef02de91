"""Globs over module paths, segment by segment: * within a segment, ** over any number of them, {0..29} and {a,b}.

`**` at the end takes one segment or more (what is inside), elsewhere none or more. A glob is run down the tree, so that a branch
which can't fit is left at its first segment, and one that `**` takes whole is taken at once.
"""

from __future__ import annotations

import re
from itertools import pairwise

from ktopt.pattern import compile_pattern
from ktopt.pattern.numbers import range_regex
from ktopt.treeindex import TreeIndex, set_of, span_of

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,6})\.\.(\d{0,6})")
_PIECE = re.compile(r"[\w*]+", re.ASCII)
LARGEST = 999_999

States = frozenset[int]


class GlobError(ValueError):
    """A glob that isn't one; says why, and at which offset."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def split(text: str) -> list[tuple[int, str]]:
    """The segments of a glob, each with its offset. Dots inside braces don't part segments."""
    segments, start, depth = [], 0, 0
    for at, c in enumerate(text):
        depth += (c == "{") - (c == "}")
        if c == "." and not depth:
            segments.append((start, text[start:at]))
            start = at + 1
    return [*segments, (start, text[start:])]


def segment_regex(segment: str, offset: int = 0) -> str:
    """A segment without ** as a regex. GlobError where it isn't one."""
    if not segment:
        raise GlobError("a segment is empty: two dots in a row, or one at an end", offset)
    if "**" in segment:
        raise GlobError("** stands for whole segments, alone between dots", offset)
    parts = _BRACES.split(segment)
    out = []
    for i, part in enumerate(parts):
        if i % 2:
            out.append(f"(?:{'|'.join(_choice(choice.strip(), offset) for choice in part.split(','))})")
        else:
            out.append(re.sub(r"[^.]", lambda m: "[^.]*" if m[0] == "*" else re.escape(m[0]), part))
    return "".join(out)


def _choice(choice: str, offset: int) -> str:
    if found := _RANGE.fullmatch(choice):
        first, last = int(found[1]), int(found[2] or LARGEST)
        if first > last:
            raise GlobError(f"the range {choice} is empty", offset)
        return range_regex(first, last)
    if not _PIECE.fullmatch(choice):
        raise GlobError(f"{{...}} holds names and ranges such as 0..29, not {choice!r}", offset)
    return choice.replace("*", "[^.]*")


class Glob:
    """A compiled glob. A state is the number of segments consumed; a run is in several at once."""

    def __init__(self, text: str) -> None:
        segments = split(text)
        self.end = len(segments)
        self.open = [segment == "**" for _, segment in segments]
        self.fits = [
            (lambda name: True) if segment == "**" else compile_pattern(segment_regex(segment, offset)).fullmatch
            for offset, segment in segments
        ]
        self.steps: dict[tuple[States, str], States] = {}
        self.start = self._with_skips({0})

    def _with_skips(self, states: set[int]) -> States:
        """With the states that a ** before the end may go on to by taking nothing."""
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state < self.end - 1 and self.open[state] and state + 1 not in states:
                states.add(state + 1)
                waiting.append(state + 1)
        return frozenset(states)

    def step(self, states: States, name: str) -> States:
        """The states after one more segment."""
        key = (states, name)
        found = self.steps.get(key)
        if found is None:
            after: set[int] = set()
            for state in states:
                if state < self.end and self.fits[state](name):
                    after.add(state + 1)
                    if self.open[state]:
                        after.add(state)
            found = self.steps[key] = self._with_skips(after)
        return found

    def takes_all_below(self, states: States) -> bool:
        """Whether everything further down is taken: the last ** has begun."""
        return self.open[-1] and self.end in states

    def matches(self, path: str) -> bool:
        states = self.start
        for name in path.split("."):
            states = self.step(states, name)
            if not states:
                return False
        return self.end in states

    def places(self, index: TreeIndex) -> int:
        """The places whose whole path fits."""
        taken: list[int] = []
        spans = 0
        modules = index.modules
        waiting = [(0, self.start)]
        while waiting:
            parent, states = waiting.pop()
            cut = len(modules[parent].path) + 1 if parent else 0
            child = parent + 1
            while child < modules[parent].end:
                module = modules[child]
                after = self.step(states, module.path[cut:])
                if self.takes_all_below(after):
                    spans |= span_of(child, module.end)
                elif after:
                    if self.end in after:
                        taken.append(child)
                    if module.end > child + 1:
                        waiting.append((child, after))
                child = module.end
        taken += [index.size + i for i, (_, alias) in enumerate(index.aliases) if self.matches(alias)]
        return spans | set_of(taken, index.places)


def numbers_written(text: str) -> list[int]:
    """The layer numbers that a glob writes out after "layers": the last of a range, or a number by itself."""
    found: list[int] = []
    segments = [segment for _, segment in split(text)]
    for before, segment in pairwise(segments):
        if before == "layers":
            found += [int(n) for n in re.findall(r"(?:\.\.|[{,]\s*|^)(\d{1,6})(?=\s*[},]|$)", segment)]
    return found


def words_written(text: str) -> list[str]:
    """The segments that a glob writes out in full."""
    return [segment for _, segment in split(text) if re.fullmatch(r"[A-Za-z_]\w*", segment)]
