"""Numbers in words, as ranges and in regexes: "0-9, 12"; "0..9, 12"; and ([0-9]|[12][0-9]) for 0 to 29."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIGHEST = 65535
"""The highest number that ranges in a file may name."""
_RANGE = re.compile(r"([0-9]{1,9})(?:\s*\.\.\s*([0-9]{1,9}))?")


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The stretches of consecutive numbers, each as (first, last)."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def in_words(numbers: Iterable[int], most: int = 6) -> str:
    """Numbers as stretches: "0-9, 12". Past `most` stretches the rest is counted."""
    found = runs(numbers)
    words = [str(a) if a == b else f"{a}-{b}" for a, b in found[:most]]
    if len(found) > most:
        words.append(f"and {sum(b - a + 1 for a, b in found[most:])} more")
    return ", ".join(words)


def as_ranges(numbers: Iterable[int]) -> str:
    """Numbers as a rule file has them: "0..9, 12"."""
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs(numbers))


def from_ranges(text: str) -> tuple[int, ...]:
    """The numbers of "0..9, 12", in order; none of "". ValueError for anything else, and for one that is named twice."""
    found: list[int] = []
    for part in filter(None, map(str.strip, text.split(","))):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r:.40} is neither a number nor a range such as 0..7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > HIGHEST:
            raise ValueError(
                f"{part!r:.40} ends before it begins" if last < first else f"{part!r:.40}: numbers go up to {HIGHEST:,}"
            )
        found += range(first, last + 1)
        if len(found) > HIGHEST + 1:
            break
    if len(found) != len(set(found)):
        twice = next(number for number in found if found.count(number) > 1)
        raise ValueError(f"{twice} is named twice")
    return tuple(sorted(found))


def number_regex(numbers: Iterable[int]) -> str:
    """A regex group that matches exactly these numbers, written in decimal without leading zeros."""
    parts = [part for first, last in runs(numbers) for part in _of_range(first, last)]
    return f"({'|'.join(parts)})"


def range_regex(first: int, last: int) -> str:
    """A regex for the numbers from `first` to `last`, however many, in a group that captures nothing."""
    return f"(?:{'|'.join(_of_range(first, last))})"


def _of_range(first: int, last: int) -> list[str]:
    """Alternatives for one stretch: each number of digits on its own."""
    parts: list[str] = []
    while first <= last:
        top = min(last, 10 ** len(str(first)) - 1)
        parts += _same_length(str(first), str(top))
        first = top + 1
    return parts


def _same_length(low: str, high: str) -> list[str]:
    if len(low) == 1:
        return [_digits(low, high)]
    if low[0] == high[0]:
        return [low[0] + rest for rest in _same_length(low[1:], high[1:])]
    width = len(low) - 1
    first, last = int(low[0]), int(high[0])
    head: list[str] = []
    tail: list[str] = []
    if low[1:] != "0" * width:
        head = [low[0] + rest for rest in _same_length(low[1:], "9" * width)]
        first += 1
    if high[1:] != "9" * width:
        tail = [high[0] + rest for rest in _same_length("0" * width, high[1:])]
        last -= 1
    middle = [_digits(str(first), str(last)) + "[0-9]" * width] if first <= last else []
    return head + middle + tail


def _digits(low: str, high: str) -> str:
    if low == high:
        return low
    return f"[{low}{high}]" if int(high) == int(low) + 1 else f"[{low}-{high}]"
