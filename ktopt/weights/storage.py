"""In which types the parameters of a model are stored, from the headers of its weight file. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ktopt.graph import ModuleGraph
from ktopt.models.shipped import known_models
from ktopt.weights.open import open_weights
from ktopt.weights.source import MissingTensor, WeightError, WeightSource

_read: WeakKeyDictionary[ModuleGraph, dict[tuple[str, int], Mapping[str, tuple[str, ...]]]] = WeakKeyDictionary()
"""What was read for a tree, by the file and when it last changed: an editor asks at every keystroke."""


def weights_of(model: Any) -> Path | None:
    """The file or folder of weights that what names a model is itself, or has beside it: a GGUF file, a folder with weights, a
    config.json in one, or a tree that was read from any of these. None where there are none."""
    name = model.name if isinstance(model, ModuleGraph) else model
    if not isinstance(name, str | os.PathLike) or not os.fspath(name) or name in known_models():
        return None
    path = Path(name)
    folder = path.parent if path.name == "config.json" else path
    if folder.is_dir():
        return folder if any(any(folder.glob(f"*.{kind}")) for kind in ("gguf", "safetensors")) else None
    return path if path.is_file() and (path.suffix == ".safetensors" or _is_gguf(path)) else None


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def storage_for(model: Any, weights: Any, graph: ModuleGraph) -> Mapping[str, tuple[str, ...]] | None:
    """storage_of `weights`, or of those that the model names itself. None where there are none, or where `weights` can't be read,
    which checking them reports."""
    if weights is None:
        own = weights_of(model)
        return None if own is None else storage_of(own, graph)
    try:
        return storage_of(weights, graph)
    except WeightError:
        return None


def storage_of(weights: str | Path | WeightSource, graph: ModuleGraph) -> Mapping[str, tuple[str, ...]]:
    """The storage types of each parameter of the tree that the weights hold: ("Q4_K",), or one for each part that it is joined of.
    WeightError for weights that can't be opened, or are of another model."""
    if not isinstance(weights, str | os.PathLike):
        return _types(weights, graph)
    path = Path(weights)
    key = (str(path), path.stat().st_mtime_ns if path.exists() else 0)
    known = _read.setdefault(graph, {})
    if key not in known:
        source = open_weights(path, graph.config)
        try:
            known[key] = _types(source, graph)
        finally:
            source.close()
    return known[key]


def _types(source: WeightSource, graph: ModuleGraph) -> dict[str, tuple[str, ...]]:
    found = {}
    for module in graph:
        prefix = f"{module.path}." if module.path else ""
        for tensor in module.parameters:
            try:
                found[prefix + tensor.name] = source.stored(prefix + tensor.name).types
            except MissingTensor:
                continue
    return found
