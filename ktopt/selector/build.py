"""From lark's parse tree to a selector's expression, with what a grammar can't say: fields, names and types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf, isinf

from lark import Token, v_args
from lark.visitors import Transformer_NonRecursive

from ktopt.operator import nearest
from ktopt.pattern import PatternError, compile_pattern
from ktopt.selector.errors import SelectorError
from ktopt.selector.evaluate import RELATIONS
from ktopt.selector.expression import AllOf, AnyOf, Call, Equal, Expression, Glob, Matches, Minus, Not, Order, Range, Ref, Unequal
from ktopt.selector.fields import FIELDS, HARDWARE_FIELDS, NUMBER_FIELDS, TEXT_FIELDS, is_number
from ktopt.selector.glob import Glob as CompiledGlob
from ktopt.selector.glob import GlobError

Node = tuple[Expression, int]
"""An expression and how deep it is."""

UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "KI": 1024, "MI": 1024**2, "GI": 1024**3, "TI": 1024**4}
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)
MAX_DIGITS = 30


@v_args(inline=True)
class Build(Transformer_NonRecursive):  # type: ignore[misc,type-arg]
    """Builds expressions bottom-up, without recursion. SelectorError at the token that is wrong."""

    def __init__(self, lets: Mapping[str, Node], max_depth: int) -> None:
        super().__init__()
        self.lets = lets
        self.max_depth = max_depth

    def _node(self, expression: Expression, *depths: int) -> Node:
        depth = 1 + max(depths, default=0)
        if depth > self.max_depth:
            raise SelectorError(f"it is nested more than {self.max_depth} deep", 0)
        return expression, depth

    def start(self, node: Node) -> Node:
        return node

    def any_of(self, *nodes: Node) -> Node:
        return self._node(AnyOf(tuple(e for e, _ in nodes)), *(d for _, d in nodes))

    def all_of(self, *nodes: Node) -> Node:
        return self._node(AllOf(tuple(e for e, _ in nodes)), *(d for _, d in nodes))

    def minus(self, *nodes: Node) -> Node:
        return self._node(Minus(tuple(e for e, _ in nodes)), *(d for _, d in nodes))

    def negation(self, node: Node) -> Node:
        return self._node(Not(node[0]), node[1])

    def ref(self, token: Token) -> Node:
        name = token[1:]
        if name not in self.lets:
            near = nearest(name, self.lets)
            known = f"did you mean ${near}?" if near else f"known: {', '.join(f'${n}' for n in self.lets)}" if self.lets else ""
            raise _at(token, f"no `let` names ${name}", known or "add it under `let:`")
        target, depth = self.lets[name]
        return self._node(Ref(name, target), depth)

    def glob(self, token: Token) -> Node:
        try:
            CompiledGlob(token[1:])
        except GlobError as error:
            raise SelectorError(
                f"glob: {error}", _start(token) + 1 + error.offset, 1, "such as @model.layers.{0..29}.mlp"
            ) from None
        except PatternError as error:
            raise _at(token, f"glob: {error.message}") from None
        return self._node(Glob(str(token[1:])))

    def call(self, token: Token, node: Node) -> Node:
        if token not in RELATIONS:
            near = nearest(token, RELATIONS)
            raise _at(token, f"no function {token}", f"did you mean {near}?" if near else f"functions are {', '.join(RELATIONS)}")
        return self._node(Call(str(token), node[0]), node[1])

    def compare(self, token: Token, equal: Token, value: Token | str) -> Node:
        field = _field(token)
        text = str(value)
        if is_number(field) and not _number(text):
            raise _at(token, f"{field} is a number, and {text!r} is none")
        return self._node(Equal(field, (text,)) if equal == "=" else Unequal(field, text))

    def regex(self, token: Token, regex: Token) -> Node:
        field = _field(token)
        if is_number(field):
            raise _at(token, f"{field} is a number, not text", f"write {field} in 0..9, or {field} >= 1")
        pattern = re.sub(r"\\.|/", lambda m: "/" if m[0] == r"\/" else m[0], regex[1:-1])
        try:
            compile_pattern(pattern)
        except PatternError as error:
            raise SelectorError(f"regex: {error.message}", _start(regex) + error.column, 1) from None
        return self._node(Matches(field, pattern))

    def within(self, token: Token, _in: Token, *items: Range | Token) -> Node:
        field = _field(token)
        for item in items:
            if isinstance(item, Range) and field in TEXT_FIELDS:
                raise _at(token, f"{field} is text, and {item} a range of numbers", f"write {field} in a, b")
            if isinstance(item, str) and is_number(field) and not _number(item):
                pair = re.fullmatch(r"(\d{1,9})[:+](\d{1,9})", item)
                help = f"a range is written {pair[1]}..{pair[2]}" if pair else f"write {field} in 0..29, 40"
                raise _at(item, f"{field} is a number, and {str(item)!r} is none", help)
        return self._node(Equal(field, tuple(i if isinstance(i, Range) else str(i) for i in items), True))

    def order(self, token: Token, sign: Token, number: Token) -> Node:
        field = _field(token)
        if field in TEXT_FIELDS or field.startswith("hw.cpu."):
            raise _at(token, f"{field} has no order", f"write {field}=... or {field}!=...")
        found = _NUMBER.fullmatch(number)
        value = float(found[1]) if found is not None and len(found[1].lstrip("-")) <= MAX_DIGITS else inf
        if found is None or isinf(value):
            raise _at(number, f"{number} is no number, or too large a one")
        value = (int(found[1]) if found[1].lstrip("-").isdigit() else value) * UNITS[found[2].upper()]
        return self._node(Order(field, str(sign), int(value) if value == int(value) else value))

    def range(self, token: Token) -> Range:
        first, _, last = (part.strip() for part in token.partition(".."))
        if len(first) > MAX_DIGITS or len(last) > MAX_DIGITS:
            raise _at(token, "the numbers are too long")
        made = Range(int(first), int(last) if last else None)
        if made.last is not None and made.last < made.first:
            raise _at(token, f"the range {made} is empty", f"write {made.last}..{made.first}")
        return made

    def bare(self, token: Token) -> Token:
        return token

    def quoted(self, token: Token) -> Token:
        text = re.sub(r"\\(.)", r"\1", token[1:-1]) if token[0] == '"' else str(token[1:-1])
        return token.update(value=text)

    def value(self, text: Token) -> Token:
        return text


def _start(token: Token) -> int:
    return token.start_pos or 0


def _at(token: Token, message: str, help: str = "") -> SelectorError:
    return SelectorError(message, _start(token), len(token), help)


def _number(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,30}(\.\d{1,30})?", text) is not None


def _field(token: Token) -> str:
    """The field that a token names."""
    name = str(token)
    if name in TEXT_FIELDS or name in NUMBER_FIELDS or re.fullmatch(r"shape\[\d+\]", name):
        return name
    head, _, key = name.partition(".")
    if head == "config" and key:
        return name
    if head == "hw" and (key in HARDWARE_FIELDS or re.fullmatch(r"cpu\.\w+", key)):
        return name
    if name == "shape":
        raise _at(token, "shape needs an axis", "write shape[0]")
    near = nearest(name, [*TEXT_FIELDS, *NUMBER_FIELDS, *(f"hw.{f}" for f in HARDWARE_FIELDS), "shape[0]"])
    raise _at(token, f"no field {name}", f"did you mean {near}?" if near else f"fields are {', '.join(FIELDS)}")
