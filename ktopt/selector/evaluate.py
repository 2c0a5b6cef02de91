"""Selectors as sets: an expression on a tree gives the set of places that it takes, as an int of bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ktopt.graph import Module
from ktopt.pattern import Pattern, compile_pattern
from ktopt.selector.expression import (
    AllOf,
    AnyOf,
    Call,
    Comparison,
    Equal,
    Expression,
    Glob,
    Matches,
    Minus,
    Not,
    Order,
    Ref,
    Unequal,
)
from ktopt.selector.fields import UNKNOWN, about_machine, about_model, config_value, holds, tensor_values
from ktopt.selector.glob import Glob as CompiledGlob
from ktopt.selector.surroundings import Surroundings
from ktopt.treeindex import TreeIndex, class_names, members, names_class, set_of, span_of


class Evaluation:
    """One tree and its surroundings. Named selectors are evaluated once."""

    def __init__(self, index: TreeIndex, config: Mapping[str, Any], around: Surroundings) -> None:
        self.index, self.config, self.around = index, config, around
        self.named: dict[int, int] = {}

    def places(self, expression: Expression) -> int:
        """The set of places that the expression takes."""
        everywhere = self.index.everywhere
        match expression:
            case AnyOf():
                found = 0
                for part in expression.parts:
                    found |= self.places(part)
                return found
            case AllOf():
                found = everywhere
                for part in expression.parts:
                    found &= self.places(part)
                return found
            case Minus():
                found = self.places(expression.parts[0])
                for part in expression.parts[1:]:
                    found &= ~self.places(part)
                return found
            case Not():
                return everywhere & ~self.places(expression.part)
            case Glob():
                return CompiledGlob(expression.text).places(self.index)
            case Call():
                modules = self.index.modules_at(self.places(expression.part))
                return self.index.places_of(RELATIONS[expression.relation](self.index, modules))
            case Ref():
                key = id(expression.target)
                if key not in self.named:
                    self.named[key] = self.places(expression.target)
                return self.named[key]
            case _:
                return self._compared(expression)

    def _compared(self, test: Comparison) -> int:
        if isinstance(test, Unequal):
            return self.index.everywhere & ~self._compared(Equal(test.field, (test.value,)))
        pattern = compile_pattern(test.pattern) if isinstance(test, Matches) else None
        field = test.field
        if about_model(field):
            return self.index.everywhere if truth_of(test, self.config, self.around) else 0
        if field in ("layer", "expert"):
            return self.index.by_number(field, lambda number: holds(test, [number]))
        if field in ("class", "type"):
            return self.index.places_of(self.index.by_class(lambda module: _class_holds(test, module, pattern)))
        if field in ("path", "name"):
            return self._by_text(test, pattern)
        return self.index.places_of(self._by_tensors(test, pattern))

    def _by_text(self, test: Comparison, pattern: Pattern | None) -> int:
        """path or name: each distinct text is tested once."""
        texts = self.index.names if test.field == "name" else self.index.paths
        if isinstance(test, Equal):
            fitting = {str(value) for value in test.values} & texts.keys()
        else:
            fitting = {text for text in texts if holds(test, [text], pattern)}
        return set_of((place for text in fitting for place in texts[text]), self.index.places)

    def _by_tensors(self, test: Comparison, pattern: Pattern | None) -> int:
        known: dict[int, bool] = {}
        found: list[int] = []
        for module in self.index.modules:
            if test.field == "quant":
                verdict = self._stored(test, module, pattern)
            else:
                key = id(module.tensors)
                if key not in known:
                    known[key] = holds(test, tensor_values(test.field, module), pattern)
                verdict = known[key]
            if verdict:
                found.append(module.index)
        return set_of(found, self.index.size)

    def _stored(self, test: Comparison, module: Module, pattern: Pattern | None) -> bool:
        """Whether a test of storage types holds of a module's own parameters."""
        if self.around.storage is None:
            return self.around.storage_supposed and bool(module.parameters)
        prefix = f"{module.path}." if module.path else ""
        return holds(test, [kind for t in module.parameters for kind in self.around.storage.get(prefix + t.name, ())], pattern)


def _class_holds(test: Comparison, module: Module, pattern: Pattern | None) -> bool:
    names = class_names(module.cls, module.alias_classes)
    if test.field == "type":
        names = (module.cls.name, *module.alias_classes)
    match test:
        case Equal():
            wanted = [str(value) for value in test.values]
            return any(names_class(written, dotted) for written in wanted for dotted in names)
        case Matches():
            return holds(test, [text for dotted in names for text in (dotted, dotted.rpartition(".")[2])], pattern)
        case _:
            return False


def truth_of(test: Comparison, config: Mapping[str, Any], around: Surroundings) -> bool | None:
    """A test of the model's config or of the machine; None where the machine isn't known."""
    if about_machine(test.field):
        value = around.machine(test.field.removeprefix("hw."))
    else:
        value = config_value(config, test.field.removeprefix("config."))
    if value is UNKNOWN:
        return None
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return holds(test, list(values), compile_pattern(test.pattern) if isinstance(test, Matches) else None)


def truth(expression: Expression, config: Mapping[str, Any], around: Surroundings) -> bool | None:
    """The truth of a condition on config and machine, or None where it depends on what isn't known. KeyError where it asks about
    modules."""
    match expression:
        case AnyOf():
            return _any(truth(part, config, around) for part in expression.parts)
        case AllOf():
            return _negate(_any(_negate(truth(part, config, around)) for part in expression.parts))
        case Minus():
            first, *rest = (truth(part, config, around) for part in expression.parts)
            return _negate(_any([_negate(first), *rest]))
        case Not():
            return _negate(truth(expression.part, config, around))
        case Ref():
            return truth(expression.target, config, around)
        case Equal() | Unequal() | Matches() | Order() if about_model(expression.field):
            return truth_of(expression, config, around)
        case _:
            raise KeyError(str(expression))


def _negate(value: bool | None) -> bool | None:
    return None if value is None else not value


def _any(values: Any) -> bool | None:
    found: bool | None = False
    for value in values:
        if value:
            return True
        if value is None:
            found = None
    return found


def _parents(index: TreeIndex, modules: int) -> int:
    return set_of({index.modules[i].parent for i in members(modules)} - {-1}, index.size)


def _children(index: TreeIndex, modules: int) -> int:
    return set_of((child for i in members(modules) for child in children(index, i)), index.size)


def children(index: TreeIndex, module: int) -> list[int]:
    found = []
    child = module + 1
    while child < index.modules[module].end:
        found.append(child)
        child = index.modules[child].end
    return found


def _under(index: TreeIndex, modules: int) -> int:
    found, covered = 0, 0
    for i in members(modules):
        end = index.modules[i].end
        if end > max(covered, i + 1):
            found |= span_of(max(covered, i + 1), end)
            covered = end
    return found


def _has(index: TreeIndex, modules: int) -> int:
    found: set[int] = set()
    for i in members(modules):
        up = index.modules[i].parent
        while up >= 0 and up not in found:
            found.add(up)
            up = index.modules[up].parent
    return set_of(found, index.size)


def _siblings(index: TreeIndex, modules: int) -> int:
    by_parent: dict[int, list[int]] = {}
    for i in members(modules):
        by_parent.setdefault(index.modules[i].parent, []).append(i)
    by_parent.pop(-1, None)
    found = [
        child for parent, chosen in by_parent.items() for child in children(index, parent) if len(chosen) > 1 or child != chosen[0]
    ]
    return set_of(found, index.size)


RELATIONS: dict[str, Callable[[TreeIndex, int], int]] = {
    "parent": _parents,
    "children": _children,
    "under": _under,
    "has": _has,
    "siblings": _siblings,
}
"""A set of modules to the set that stands in the relation to any of them."""
