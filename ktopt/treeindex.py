"""What selecting from a tree needs beyond the tree: the paths that a rule may name, and sets of modules as ints.

A place is a module by one of its paths. Places 0 to len(graph)-1 are the modules by their own paths; after them come the aliases,
so a set of places without alias bits is a set of modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from ktopt.graph import Module, ModuleClass, ModuleGraph

_ONES = re.compile("1")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def set_of(indices: Iterable[int], size: int) -> int:
    """The set of these indices, all below `size`."""
    packed = bytearray((size + 7) // 8)
    for i in indices:
        packed[i >> 3] |= 1 << (i & 7)
    return int.from_bytes(packed, "little")


def span_of(start: int, end: int) -> int:
    """The set of range(start, end)."""
    return ((1 << (end - start)) - 1) << start


def members(bits: int) -> Iterator[int]:
    """The indices in a set, ascending."""
    return (found.start() for found in _ONES.finditer(bin(bits)[:1:-1]))


def class_names(cls: ModuleClass, alias_classes: tuple[str, ...]) -> tuple[str, ...]:
    """Every dotted class name that a rule may know a module by."""
    return (*cls.mro, *alias_classes)


def names_class(written: str, dotted: str) -> bool:
    """Whether a class as a rule writes it means the class `dotted`: by the whole name, by its last part alone, or by package and
    last part (torch.nn.Linear for torch.nn.modules.linear.Linear)."""
    if written == dotted:
        return True
    package, dot, rest = written.partition(".")
    if not dot:
        return dotted.rpartition(".")[2] == written
    simple = rest.rpartition(".")[2]
    return dotted.startswith(f"{package}.") and dotted.endswith(f".{simple}")


def is_a(written: str, module: Module) -> bool:
    """Whether a module is an instance of the class that a rule writes."""
    return any(names_class(written, dotted) for dotted in class_names(module.cls, module.alias_classes))


class TreeIndex:
    """Derived once from a graph, on demand."""

    def __init__(self, graph: ModuleGraph) -> None:
        self.modules = graph.modules
        self.size = len(graph.modules)
        self.taken: dict[tuple[str | None, str | None], int] = {}
        """The modules that a name and a class clause take; clauses.py fills it."""
        self.selected: dict[int, tuple[Any, int]] = {}
        """The places that a selector's expression takes, by the expression's id, which is its own as long as it is kept here."""
        self.gave_up: dict[Any, tuple[float, Any]] = {}
        """When a name's pattern, or a selector's expression by its id, last used up its time, of time.monotonic()."""

    @cached_property
    def aliases(self) -> tuple[tuple[int, str], ...]:
        """(module index, alias path) of the places beyond the modules."""
        return tuple((m.index, alias) for m in self.modules if m.alias_paths for alias in m.alias_paths)

    @cached_property
    def aliased(self) -> int:
        """The modules that have alias paths."""
        return set_of({index for index, _ in self.aliases}, self.size)

    @property
    def places(self) -> int:
        return self.size + len(self.aliases)

    @cached_property
    def everywhere(self) -> int:
        """The set of all places."""
        return span_of(0, self.places)

    @cached_property
    def first_alias_place(self) -> dict[int, int]:
        """A module's first alias place, by module index. Its other aliases follow."""
        found: dict[int, int] = {}
        for offset, (index, _) in enumerate(self.aliases):
            found.setdefault(index, self.size + offset)
        return found

    def path(self, place: int) -> str:
        return self.modules[place].path if place < self.size else self.aliases[place - self.size][1]

    @cached_property
    def paths(self) -> dict[str, list[int]]:
        """The place of each path."""
        return {self.path(place): [place] for place in range(self.places)}

    @cached_property
    def names(self) -> dict[str, list[int]]:
        """The places by the last segment of their path."""
        groups: dict[str, list[int]] = {}
        for place in range(self.places):
            groups.setdefault(self.path(place).rpartition(".")[2], []).append(place)
        return groups

    def modules_at(self, places: int) -> int:
        """The modules that a set of places touches."""
        own = places & span_of(0, self.size)
        beyond = places >> self.size
        return own | set_of({self.aliases[i][0] for i in members(beyond)}, self.size) if beyond else own

    def places_of(self, modules: int) -> int:
        """All places of a set of modules."""
        if not modules & self.aliased:
            return modules
        beyond = set_of((i for i, (index, _) in enumerate(self.aliases) if modules >> index & 1), len(self.aliases))
        return modules | beyond << self.size

    @cached_property
    def classes(self) -> list[tuple[Module, int]]:
        """The distinct classes: one module that has it, and the set of all that do."""
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for m in self.modules:
            key = (id(m.cls), m.alias_classes)
            group = groups.get(key)
            if group is None:
                group = groups[key] = []
            group.append(m.index)
        return [(self.modules[indices[0]], set_of(indices, self.size)) for indices in groups.values()]

    def by_class(self, wanted: Callable[[Module], bool]) -> int:
        """The modules whose class `wanted` accepts; it is asked once a class."""
        found = 0
        for example, group in self.classes:
            if wanted(example):
                found |= group
        return found

    def by_number(self, attribute: str, wanted: Callable[[int], bool]) -> int:
        """The places whose "layer" or "expert" number `wanted` accepts. An alias lies in the layer that its path names."""
        numbers = self.layers if attribute == "layer" else self.experts
        found = 0
        for number, places in numbers.items():
            if wanted(number):
                found |= places
        return found

    @cached_property
    def layers(self) -> dict[int, int]:
        """The places in each decoder layer."""
        groups: dict[int, list[int]] = {}
        for m in self.modules:
            if m.layer is not None:
                groups.setdefault(m.layer, []).append(m.index)
        for offset, (index, alias) in enumerate(self.aliases):
            found = _LAYER.search(alias)
            layer = int(found[1]) if found else self.modules[index].layer
            if layer is not None:
                groups.setdefault(layer, []).append(self.size + offset)
        return {layer: set_of(places, self.places) for layer, places in groups.items()}

    @cached_property
    def experts(self) -> dict[int, int]:
        """The places in each expert."""
        groups: dict[int, list[int]] = {}
        for m in self.modules:
            if m.expert is not None:
                groups.setdefault(m.expert, []).append(m.index)
        for offset, (index, _) in enumerate(self.aliases):
            expert = self.modules[index].expert
            if expert is not None:
                groups.setdefault(expert, []).append(self.size + offset)
        return {expert: set_of(places, self.places) for expert, places in groups.items()}


_indices: WeakKeyDictionary[ModuleGraph, TreeIndex] = WeakKeyDictionary()


def index_of(graph: ModuleGraph) -> TreeIndex:
    """The graph's index, made at its first use and kept as long as the graph. It holds the modules but not the graph itself."""
    index = _indices.get(graph)
    if index is None:
        index = _indices[graph] = TreeIndex(graph)
    return index
