"""The syntax tree of a selector, and how it prints. No lark here: a compiled rule set needs only this."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

PLAIN_VALUE = re.compile(r"[\w:+]+(?:\.[\w:+]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Modules in any of the parts."""

    parts: tuple[Expression, ...]

    def __str__(self) -> str:
        return " | ".join(_text(part, 1) for part in self.parts)


@dataclass(frozen=True, slots=True)
class AllOf:
    """Modules in all of the parts."""

    parts: tuple[Expression, ...]

    def __str__(self) -> str:
        return " & ".join(_text(part, 2) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Minus:
    """Modules in the first part and in none of the others."""

    parts: tuple[Expression, ...]

    def __str__(self) -> str:
        return " - ".join(_text(part, 3) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Not:
    """Modules that aren't in the part."""

    part: Expression

    def __str__(self) -> str:
        return f"!{_text(self.part, 3)}"


@dataclass(frozen=True, slots=True)
class Glob:
    """Modules whose whole path fits a glob, written without its @."""

    text: str

    def __str__(self) -> str:
        return f"@{self.text}"


@dataclass(frozen=True, slots=True)
class Call:
    """Modules that stand in a relation (parent, children, under, has, siblings) to those of the part."""

    relation: str
    part: Expression

    def __str__(self) -> str:
        return f"{self.relation}({self.part})"


@dataclass(frozen=True, slots=True)
class Ref:
    """A named selector of the file's `let`. Two references are equal when their names are."""

    name: str
    target: Expression = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"${self.name}"


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `first` to `last`, both included; to the end where `last` is None."""

    first: int
    last: int | None

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int | float) and self.first <= number and (self.last is None or number <= self.last)

    def __str__(self) -> str:
        return f"{self.first}..{'' if self.last is None else self.last}"


@dataclass(frozen=True, slots=True)
class Equal:
    """A field has one of these values, or lies in one of these ranges. `listed` where it was written with `in`."""

    field: str
    values: tuple[str | Range, ...]
    listed: bool = False

    def __str__(self) -> str:
        words = ", ".join(str(v) if isinstance(v, Range) else quoted(v) for v in self.values)
        return f"{self.field} in {words}" if self.listed else f"{self.field}={words}"


@dataclass(frozen=True, slots=True)
class Unequal:
    """A field hasn't this value: the complement of Equal, so that modules without the field are in it."""

    field: str
    value: str

    def __str__(self) -> str:
        return f"{self.field}!={quoted(self.value)}"


@dataclass(frozen=True, slots=True)
class Matches:
    """The whole of a field is a regex."""

    field: str
    pattern: str

    def __str__(self) -> str:
        escaped = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], self.pattern)
        return f"{self.field} ~ /{escaped}/"


@dataclass(frozen=True, slots=True)
class Order:
    """A field's number compared with `bound`: one of >= <= > <."""

    field: str
    sign: str
    bound: int | float

    def holds(self, number: float) -> bool:
        return {
            ">=": number >= self.bound,
            "<=": number <= self.bound,
            ">": number > self.bound,
            "<": number < self.bound,
        }[self.sign]

    def __str__(self) -> str:
        return f"{self.field} {self.sign} {self.bound}"


Comparison = Equal | Unequal | Matches | Order
Expression = AnyOf | AllOf | Minus | Not | Glob | Call | Ref | Equal | Unequal | Matches | Order

_LEVEL: dict[type, int] = {AnyOf: 0, AllOf: 1, Minus: 2}


def _text(part: Expression, level: int) -> str:
    """A part as an operand: in parentheses where it binds no tighter than what it stands in."""
    return f"({part})" if _LEVEL.get(type(part), 3) < level else str(part)


def quoted(value: str) -> str:
    """A value as written: bare where it can be."""
    if PLAIN_VALUE.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def walk(expression: Expression, *, into_named: bool = True) -> list[Expression]:
    """Every node, each named selector once; those within named selectors too, unless told otherwise."""
    found: list[Expression] = []
    seen: set[int] = set()
    waiting = [expression]
    while waiting:
        node = waiting.pop()
        found.append(node)
        match node:
            case AnyOf() | AllOf() | Minus():
                waiting.extend(reversed(node.parts))
            case Not() | Call():
                waiting.append(node.part)
            case Ref() if into_named and id(node.target) not in seen:
                seen.add(id(node.target))
                waiting.append(node.target)
            case _:
                pass
    return found
