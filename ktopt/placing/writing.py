"""A placement as lines of a `place:` map, folded as a person would write them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ktopt.folding import fold_paths
from ktopt.graph import Module, ModuleGraph
from ktopt.pattern.numbers import runs


@dataclass(frozen=True)
class Line:
    """One line: a device, what the file had there already ("" for nothing), and what is added."""

    device: str
    written: str
    added: str

    @property
    def text(self) -> str:
        return " | ".join(filter(None, (self.written, self.added)))


def place_lines(
    graph: ModuleGraph, wanted: Mapping[int, str], free: Collection[int], written: Sequence[tuple[str, str, Collection[int]]] = ()
) -> list[Line]:
    """The lines that put every module of `wanted` (module index -> device) on its device.

    free      those of them that nothing places yet
    written   lines that the file has, in order: a device, its selector, and the modules that this takes. They stay where they are,
              and get what is added for their device; lines for other devices follow
    """
    by_device: dict[str, list[int]] = {}
    for index in sorted(free):
        by_device.setdefault(wanted[index], []).append(index)
    main = _main_device(graph, by_device)
    added = [d for d in sorted(by_device, key=_rank) if d not in {device for device, _, _ in written} and d != main]
    order = [*written, *((d, "", ()) for d in added)]
    if main is not None and all(device != main for device, _, _ in written):
        order.append((main, "", ()))
    taken: set[int] = set()
    lines = []
    for device, text, takes in order:
        taken.update(takes)
        mine = by_device.pop(device, [])
        whole = device == main and order[-1][0] == main and device not in by_device
        natural, claims = ("@**", range(len(graph))) if whole and mine else _natural(graph, mine)
        wrong = [i for i in claims if i not in taken and wanted.get(i, device) != device]
        if wrong:
            natural = f"({natural}) - ({_globs(graph, wrong)})" if " | " in natural else f"{natural} - ({_globs(graph, wrong)})"
        taken.update(i for i in claims if i in wanted and wanted[i] == device)
        lines.append(Line(device, text, natural))
    return [line for line in lines if line.text]


def _main_device(graph: ModuleGraph, by_device: Mapping[str, Sequence[int]]) -> str | None:
    """The device of every layer's own modules, where it is one: its line can take all that is left."""
    homes = {d for d, indices in by_device.items() if any(_is_home(graph, graph.modules[i]) for i in indices)}
    return homes.pop() if len(homes) == 1 else None


def _is_home(graph: ModuleGraph, module: Module) -> bool:
    return module.layer is not None and module.role != "experts" and all(a.role != "experts" for a in graph.ancestors(module))


def _rank(device: str) -> tuple[bool, str, int]:
    """Main memory first: what lies there are exceptions, and the first line that takes a module places it."""
    kind, _, number = device.partition(":")
    return device != "cpu", kind, int(number or 0)


def _natural(graph: ModuleGraph, indices: Sequence[int]) -> tuple[str, list[int]]:
    """A selector that takes these modules and perhaps more of their layers; and what it takes."""
    modules = [graph.modules[i] for i in indices]
    layers = {m.layer for m in modules if m.layer is not None and _is_home(graph, m)}
    parts = [f"layer in {_ranges(layers, graph.layer_count - 1)}"] if layers else []
    rest = [m.index for m in modules if m.layer not in layers]
    if rest:
        parts.append(_globs(graph, rest))
    return " | ".join(parts), [m.index for m in graph.modules if m.layer in layers and m.layer is not None] + rest


def _ranges(layers: Collection[int], last: int) -> str:
    return ", ".join(f"{a}.." if b == last and a < b else str(a) if a == b else f"{a}..{b}" for a, b in runs(layers))


def _globs(graph: ModuleGraph, indices: Sequence[int]) -> str:
    """Globs for exactly these modules: of those below one another the topmost, where all of its tensors are in."""
    chosen, tops = set(indices), []
    covered = -1
    for index in sorted(chosen):
        if index < covered:
            continue
        module = graph.modules[index]
        tops.append(module.path)
        if any(i in chosen for i in range(index + 1, module.end)):
            tops.append(f"{module.path}.**")
            covered = module.end
    return " | ".join(f"@{pattern.text}" for pattern in fold_paths(tops))
