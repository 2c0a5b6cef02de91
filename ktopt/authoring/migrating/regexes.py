"""A rule's regex taken apart: the alternatives of which it consists, the layer numbers that each takes, what it excludes.

Only the regexes that rule files are made of are understood: paths with `.*`, one group or class for the layer's number, negative
look-aheads. `read_alternative` returns None for any other, and its rule keeps its regex.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

ANY, NUMBER = "\0", "\1"
_QUANTIFIER = re.compile(r"[*+?]\??|\{\d*,?\d*\}")


@dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative of a regex.

    skeleton   its literal text, ANY for each `.*`, NUMBER for the layer's number
    numbers    the layer numbers that it takes; None where it names none
    excluded   each negative look-ahead's own text
    base       the regex without look-aheads
    with_one   for each look-ahead, the regex with that one alone
    begins, ends   whether it is anchored there
    """

    skeleton: str
    numbers: frozenset[int] | None
    excluded: tuple[str, ...]
    base: str
    with_one: tuple[str, ...]
    begins: bool
    ends: bool


def split_alternatives(regex: str) -> list[str]:
    """The parts between the | that stand in no group, each without parentheses around the whole of it."""
    parts, start, at = [], 0, 0
    while at < len(regex):
        if regex[at] == "|":
            parts.append(regex[start:at])
            start = at + 1
        at = _after(regex, at)
    parts.append(regex[start:])
    if len(parts) == 1 and _bare(regex) == regex:
        return parts
    return [piece for part in parts for piece in split_alternatives(_bare(part))]


def _after(regex: str, at: int) -> int:
    """The offset behind the group, class, escape or character at `at`."""
    if regex[at] == "\\":
        return at + 2
    if regex[at] == "[":
        end = regex.find("]", at + 2)
        return end + 1 if end > 0 else len(regex)
    if regex[at] == "(":
        at += 1
        while at < len(regex) and regex[at] != ")":
            at = _after(regex, at)
        return at + 1
    return at + 1


def _bare(regex: str) -> str:
    inner = regex[3:-1] if regex.startswith("(?:") else regex[1:-1]
    whole = regex.startswith("(") and _after(regex, 0) == len(regex) and not inner.startswith("?")
    return inner if whole else regex


def read_alternative(regex: str, layers: int) -> Alternative | None:
    """An alternative in a model of so many layers. None where it isn't of a kind that is understood."""
    found = _Reader(regex, layers)
    return found.read()


class _Reader:
    def __init__(self, regex: str, layers: int) -> None:
        self.regex, self.layers = regex, layers
        self.skeleton = ""
        self.numbers: frozenset[int] | None = None
        self.looks: list[tuple[int, int]] = []

    def read(self) -> Alternative | None:
        regex = self.regex
        begins, ends = regex.startswith("^"), regex.endswith("$") and not regex.endswith("\\$")
        at, end = int(begins), len(regex) - ends
        while at < end:
            after = self.take(at)
            if after is None or after > end:
                return None
            at = after
        texts = tuple(regex[a + 3 : b - 1] for a, b in self.looks)
        only = tuple(self.without([look for look in self.looks if look != one]) for one in self.looks)
        return Alternative(self.skeleton, self.numbers, texts, self.without(self.looks), only, begins, ends)

    def without(self, looks: list[tuple[int, int]]) -> str:
        text = self.regex
        for start, end in reversed(looks):
            text = text[:start] + text[end:]
        return text

    def take(self, at: int) -> int | None:
        """Read what stands at `at`; where it ends, or None for what isn't understood."""
        regex = self.regex
        if regex.startswith("(?!", at):
            self.looks.append((at, _after(regex, at)))
            return self.looks[-1][1]
        if regex.startswith(".*", at):
            self.skeleton += ANY
            return at + 2 + (regex[at + 2 : at + 3] == "?")
        if self.skeleton.endswith("layers.") and (slot := self.slot(at)) > at:
            numbers = frozenset(n for n in range(self.layers) if re.fullmatch(regex[at:slot], str(n)))
            if not numbers or self.numbers is not None:
                return None
            self.numbers = numbers
            self.skeleton += NUMBER
            return slot
        after = _after(regex, at)
        letter = regex[at:after].removeprefix("\\")
        if _QUANTIFIER.match(regex, after) or not (letter == "." or re.fullmatch(r"[\w-]", letter)):
            return None
        if regex[at] == "\\" and letter.isalnum():
            return None
        self.skeleton += letter
        return after

    def slot(self, at: int) -> int:
        """Where the digits, classes and groups of digits that begin at `at` end."""
        while at < len(self.regex):
            after = _after(self.regex, at)
            if not re.fullmatch(r"\d|\\d|\[[\d-]+\]|\((?:\?:)?[\d\[\]|\\d*+?{},-]+\)", self.regex[at:after]):
                break
            quantifier = _QUANTIFIER.match(self.regex, after)
            at = quantifier.end() if quantifier else after
        return at


def globs(alternative: Alternative) -> Iterator[str]:
    """Globs that may take what the alternative takes without its look-aheads, the plainest first; NUMBER is any layer."""
    pieces = re.split(f"({ANY})", alternative.skeleton.replace(NUMBER, "*"))
    choices = [_choices(pieces, i) if piece == ANY else [piece] for i, piece in enumerate(pieces)]
    for chosen in product(*choices):
        text = "".join(chosen)
        heads = [text] if alternative.begins else [text, f"**.{text.lstrip('.')}"]
        for head in heads:
            if head.endswith("."):
                yield f"@{head}**"
                continue
            yield f"@{head}"
            if not alternative.ends:
                yield f"@{head}*"
                yield f"(@{head} | @{head}.**)"
                yield f"(@{head}* | @{head}*.**)"


def _choices(pieces: list[str], at: int) -> list[str]:
    """What a `.*` may stand for between its neighbours."""
    before, after = "".join(pieces[:at]), "".join(pieces[at + 1 :])
    if before and not before.endswith("."):
        return ["*"]
    if after and not after.startswith("."):
        return ["*", "**.*"]
    if before.endswith("layers."):
        return ["*", "**"] if after else ["*.**", "**", "*"]
    return ["**", "*"]


def exclusions(look_ahead: str) -> Iterator[str]:
    """Selectors that may take what a look-ahead excludes, the plainest first."""
    text = look_ahead.removeprefix(".*").removesuffix("$").removesuffix(".*")
    path = text.replace("\\.", ".").strip(".")
    if not re.fullmatch(r"[\w.]+", path):
        return
    yield f"name={path.rpartition('.')[2]}"
    yield from (f"@**.{path}", f"@**.{path}.**", f"@**.{path}*", f"@**.{path}*.**")
    yield f"(@**.{path} | @**.{path}.**)"
    yield f"(@**.{path}* | @**.{path}*.**)"
