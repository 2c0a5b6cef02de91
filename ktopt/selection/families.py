"""Modules that repeat from layer to layer, and sets of modules in words."""

from __future__ import annotations

from collections.abc import Iterable

from ktopt.graph import Module, ModuleGraph
from ktopt.pattern.numbers import in_words as numbers_in_words


def template(module: Module) -> str:
    """The module's path with its layer and expert numbers as *: one text for the same module of every layer."""
    path = module.path
    if module.layer is not None:
        path = f"{path}.".replace(f"layers.{module.layer}.", "layers.*.", 1)[:-1]
    if module.expert is not None:
        path = f"{path}.".replace(f"experts.{module.expert}.", "experts.*.", 1)[:-1]
    return path


def inner_name(module: Module) -> str:
    """The module's path within its layer, such as "self_attn.q_proj"; the whole path outside layers."""
    return template(module).partition("layers.*.")[2] or module.path


def in_words(graph: ModuleGraph, indices: Iterable[int], most: int = 3) -> str:
    """A set of modules as their distinct templates: "model.layers.*.mlp (58 modules), model.norm, and 12 more"."""
    counts: dict[str, int] = {}
    for index in indices:
        key = template(graph.modules[index])
        counts[key] = counts.get(key, 0) + 1
    words = [
        f"{key or 'the model itself'} ({count} modules)" if count > 1 else key or "the model itself"
        for key, count in counts.items()
    ]
    if len(words) > most:
        rest = sum(list(counts.values())[most:])
        words = [*words[:most], f"and {rest} more"]
    return ", ".join(words)


def layers_in_words(layers: Iterable[int]) -> str:
    """Layer numbers with their noun: "layer 30" or "layers 0-2, 5"."""
    numbers = set(layers)
    return f"layer{'' if len(numbers) == 1 else 's'} {numbers_in_words(numbers)}"


class Family:
    """One template's modules, by layer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_layer: dict[int, Module] = {}


def families(modules: Iterable[Module]) -> list[Family]:
    """Those in decoder layers, grouped by template and class: what covers one layer of a family should cover them all."""
    found: dict[tuple[str, int], Family] = {}
    for module in modules:
        if module.layer is None or module.expert is not None:
            continue
        key = (template(module), id(module.cls))
        family = found.get(key)
        if family is None:
            family = found[key] = Family(key[0])
        family.by_layer[module.layer] = module
    return list(found.values())
