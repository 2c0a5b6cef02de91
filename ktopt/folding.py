"""Many module paths as few patterns: "model.layers.{3..60}.mlp.experts" for fifty-eight of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ktopt.pattern.numbers import runs

Numbers = tuple[int, ...]


class Pattern(NamedTuple):
    """A folded path and the paths that it stands for, in their order."""

    text: str
    paths: tuple[str, ...]


def fold_paths(paths: Iterable[str]) -> list[Pattern]:
    """Patterns that together stand for exactly `paths`, in the order in which each first occurs. Every number in a path may fold:
    "layers.{0..2}.experts.{0..255}" stands for each pair."""
    templates: dict[str, dict[Numbers, str]] = {}
    for path in paths:
        template, numbers = _split(path)
        templates.setdefault(template, {})[numbers] = path
    folded = []
    for template, members in templates.items():
        for ranges, covered in _products(list(members)):
            folded.append(Pattern(template.format(*ranges), tuple(members[numbers] for numbers in covered)))
    return folded


def _split(path: str) -> tuple[str, Numbers]:
    segments = path.replace("{", "{{").replace("}", "}}").split(".")
    numbers = tuple(int(s) for s in segments if s.isdecimal())
    return ".".join("{}" if s.isdecimal() else s for s in segments), numbers


def _products(members: list[Numbers]) -> list[tuple[list[str], list[Numbers]]]:
    """Sets of number tuples as products of ranges: for each product its ranges, and its members."""
    if not members or not members[0]:
        return [([], members)]
    tails: dict[int, list[Numbers]] = {}
    for first, *rest in members:
        tails.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[Numbers, ...], list[int]] = {}
    for first, rests in tails.items():
        firsts.setdefault(tuple(rests), []).append(first)
    found = []
    for rests_of, numbers in firsts.items():
        for ranges, covered in _products(list(rests_of)):
            found.append(([number_ranges(numbers), *ranges], [(n, *rest) for n in numbers for rest in covered]))
    return found


def number_ranges(numbers: Iterable[int]) -> str:
    """ "7" for one number, "{0..2,5}" for more."""
    spans = runs(numbers)
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return str(spans[0][0])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in spans) + "}"


def fold_names(paths: Iterable[str]) -> list[str]:
    """The patterns of fold_paths as text, those of one parent that end in different names as one: "mlp.{gate_proj,up_proj}"."""
    groups: dict[tuple[str, str], list[str]] = {}
    for pattern in fold_paths(paths):
        parent, _, name = pattern.text.rpartition(".")
        numbered = not parent or name.endswith("}") or name.isdecimal()
        groups.setdefault((pattern.text, "") if numbered else (parent, "."), []).append(name)
    return [
        text or "(the model)" if not dot else f"{text}.{names[0] if len(names) == 1 else '{' + ','.join(names) + '}'}"
        for (text, dot), names in groups.items()
    ]
