"""Whether a pattern can match anything below a module, seen from the beginning of the pattern alone.

Most of a big tree lies below modules such as model.layers.5.mlp.experts, where few rules can take anything: the others' patterns
begin with another layer's number, or go on with another name.
"""

from __future__ import annotations

import importlib
from functools import cached_property, lru_cache
from typing import Any

_parser: Any = importlib.import_module("re._parser")
_compiler: Any = importlib.import_module("re._compiler")

PLAIN = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "BRANCH", "SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT")


class PrefixFilter:
    """The leading part of a pattern that is anchored at the start and looks neither ahead nor back."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._heads: dict[int, Any] = {}

    @cached_property
    def _tree(self) -> Any:
        return _parser.parse(self.text)

    @cached_property
    def _leading(self) -> list[tuple[Any, int]]:
        """The elements after ^ up to the first that isn't plain, each with the most characters that it spans."""
        items = list(self._tree)
        flags = self._tree.state.flags & ~_parser.SRE_FLAG_UNICODE
        if not items or str(items[0][0]) != "AT" or str(items[0][1]) != "AT_BEGINNING" or flags:
            return []
        leading = []
        for item in items[1:]:
            if not _plain(item):
                break
            width = self._pattern([item]).getwidth()[1]
            if width >= _parser.MAXREPEAT:
                break
            leading.append((item, int(width)))
        return leading

    @cached_property
    def _longest(self) -> int | None:
        """The most characters that a match can have, where the pattern is its leading part and $; else None."""
        items = list(self._tree)
        ends = bool(self._leading) and str(items[-1][0]) == "AT" and str(items[-1][1]) == "AT_END"
        return sum(width for _, width in self._leading) if ends and len(items) == len(self._leading) + 2 else None

    @cached_property
    def _literal(self) -> str:
        """The literal text that the leading part begins with."""
        text = ""
        for (op, arg), _ in self._leading:
            if str(op) != "LITERAL":
                break
            text += chr(arg)
        return text

    def _pattern(self, items: list[Any]) -> Any:
        return _parser.SubPattern(self._tree.state, items)

    def possible(self, prefix: str) -> bool:
        """False where no path that begins with `prefix` can match."""
        literal = self._literal
        if self._longest is not None and len(prefix) >= self._longest:
            return False
        if not prefix.startswith(literal[: len(prefix)]):
            return False
        if len(literal) >= len(prefix):
            return True
        return self._head(len(prefix)).match(prefix) is not None

    def certain(self, prefix: str) -> bool:
        """True where every path that begins with `prefix` matches: all of the pattern lies within it."""
        if len(self._leading) + 1 != len(self._tree) or not self._leading or sum(w for _, w in self._leading) > len(prefix):
            return False
        return self._head(len(prefix)).match(prefix) is not None

    def _head(self, length: int) -> Any:
        """The leading elements that lie within `length` characters, compiled."""
        count = 0
        for _, width in self._leading:
            length -= width
            if length < 0:
                break
            count += 1
        head = self._heads.get(count)
        if head is None:
            head = self._heads[count] = _compiler.compile(self._pattern([item for item, _ in self._leading[:count]]))
        return head


@lru_cache(maxsize=1024)
def prefix_filter(text: str) -> PrefixFilter:
    """The filter of a pattern, made once."""
    return PrefixFilter(text)


def _plain(item: tuple[Any, Any]) -> bool:
    """Whether an element, and all that it holds, only spans characters."""
    op, arg = item
    name = str(op)
    if name not in PLAIN:
        return False
    if name == "BRANCH":
        return all(_plain(inner) for part in arg[1] for inner in part)
    if name == "SUBPATTERN":
        _, added, removed, body = arg
        return not added and not removed and all(_plain(inner) for inner in body)
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        return all(_plain(inner) for inner in arg[2])
    return True
