"""The `place:` map of a migrated file: where the old rules put each layer, and what lies elsewhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ktopt.authoring.migrating.drafts import Old
from ktopt.authoring.migrating.selectors import layer_ranges
from ktopt.authoring.migrating.trees import Tree
from ktopt.match import Matches
from ktopt.treeindex import members

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.|$)")


@dataclass
class PlaceMap:
    """Lines of a `place:` map: a device and what is there (the first line that takes a module places it), and the device of all
    else ("" where the lines take everything)."""

    lines: dict[str, list[str]] = field(default_factory=dict)
    default: str = ""

    def add(self, device: str, selector: str) -> None:
        self.lines.setdefault(device, []).append(selector)

    def before_rest(self, more: Mapping[str, str]) -> PlaceMap | None:
        """The map with more modules on other devices than the one that takes all the rest; None where no line does."""
        rest = next((device for device, parts in self.lines.items() if parts == ["@**"]), None)
        if rest is None or rest in more:
            return None
        lines = {device: list(parts) for device, parts in self.lines.items() if device != rest}
        for device, selector in more.items():
            lines.setdefault(device, []).append(selector)
        return PlaceMap({**lines, rest: ["@**"]}, self.default)

    def texts(self) -> dict[str, str]:
        return {device: " | ".join(parts) for device, parts in self.lines.items()}


def needs(olds: Sequence[Old], trees: Sequence[Tree], matches: Sequence[Matches], default: str) -> list[dict[int, str]]:
    """For each model the device that each place has to have: those of modules that own something or are replaced."""
    found: list[dict[int, str]] = []
    for number, (tree, match) in enumerate(zip(trees, matches, strict=True)):
        wanted: dict[int, str] = {}
        for module, decision in match.open:
            if decision.rule is None and module.tensors:
                wanted[module.index] = default
        for old in olds:
            replaced = old.rule.replace.operator.name != "default"
            for place in members(old.wins[number]):
                owner = place if place < tree.index.size else tree.index.aliases[place - tree.index.size][0]
                if replaced or tree.graph.modules[owner].tensors:
                    wanted[place] = old.home
        found.append(wanted)
    return found


def place_map(wanted: Sequence[dict[int, str]], trees: Sequence[Tree], default: str) -> PlaceMap:
    """The fewest lines that put every layer where most of it has to be, and modules outside of layers where they have to be."""
    layers = _layer_devices(wanted, trees)
    devices = list(dict.fromkeys(layers[n] for n in sorted(layers)))
    outside = _outside(wanted, trees)
    made = PlaceMap()
    if len(devices) < 2:
        whole = devices[0] if devices else default
        for path, device in outside.items():
            if device != whole:
                made.add(device, f"@{path}")
        made.add(whole, "@**")
        return made
    made.default = default
    for device in devices:
        made.add(device, layer_ranges(frozenset(n for n, d in layers.items() if d == device), trees))
    for path, device in outside.items():
        if device != default:
            made.add(device, f"@{path}")
    return made


def _layer_devices(wanted: Sequence[dict[int, str]], trees: Sequence[Tree]) -> dict[int, str]:
    counts: dict[int, Counter[str]] = {}
    for tree, places in zip(trees, wanted, strict=True):
        for layer, inside in tree.index.layers.items():
            counts.setdefault(layer, Counter()).update(places[at] for at in members(inside) if at in places)
    return {layer: count.most_common(1)[0][0] for layer, count in counts.items() if count}


def _outside(wanted: Sequence[dict[int, str]], trees: Sequence[Tree]) -> dict[str, str]:
    """Modules outside of layers, by path. Those that have older paths inside layers are placed by these."""
    found: dict[str, str] = {}
    for tree, places in zip(trees, wanted, strict=True):
        for at, device in sorted(places.items()):
            module = tree.graph.modules[at] if at < tree.index.size else None
            if module is not None and module.layer is None and module.path and _LAYER.search(module.path) is None:
                found.setdefault(module.path, device)
    return found


def homes(lines: PlaceMap, trees: Sequence[Tree]) -> list[dict[int, str]]:
    """Where the lines put each place of each model; places that no line takes are left out."""
    found: list[dict[int, str]] = []
    for tree in trees:
        left = tree.index.everywhere
        placed: dict[int, str] = {}
        for device, text in lines.texts().items():
            taken = (tree.select(text) or 0) & left
            left &= ~taken
            placed.update(dict.fromkeys(members(taken), device))
        found.append(placed)
    return found


def exceptions(
    olds: Sequence[Old], wanted: Sequence[dict[int, str]], homes: Sequence[dict[int, str]], trees: Sequence[Tree], default: str
) -> list[tuple[str, str]]:
    """Modules that the map puts elsewhere than they have to be, and that no rule of the new file takes: (device, path)."""
    ruled = [0] * len(trees)
    for old in olds:
        ruled = [a | b for a, b in zip(ruled, old.wins, strict=True)]
    found: list[tuple[str, str]] = []
    for tree, places, home, by_rule in zip(trees, wanted, homes, ruled, strict=True):
        for at, device in places.items():
            if (home.get(at) or default) != device and not by_rule >> at & 1:
                found.append((device, tree.index.path(at)))
    return found


def by_device(modules: Iterable[tuple[str, str]], trees: Sequence[Tree]) -> dict[str, str]:
    """Modules, each with its device, as a selector for each device: a glob for those that differ in their layer alone."""
    found: dict[tuple[str, str], set[int]] = {}
    for device, path in modules:
        number = _LAYER.search(path)
        found.setdefault((device, _LAYER.sub("*", path)), set()).add(int(number[0]) if number else -1)
    lines: dict[str, list[str]] = {}
    for (device, path), layers in found.items():
        every = {m.layer for tree in trees for m in tree.graph.modules if m.layer is not None and _LAYER.sub("*", m.path) == path}
        limit = "" if layers >= every or -1 in layers else f" & {layer_ranges(frozenset(layers), trees)}"
        lines.setdefault(device, []).append(f"@{path}{limit}")
    return {device: " | ".join(parts) for device, parts in lines.items()}
