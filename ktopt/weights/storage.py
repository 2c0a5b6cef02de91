"""How the parameters of a model are stored, from the headers of its weight file. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ktopt.graph import ModuleGraph
from ktopt.models.shipped import known_models
from ktopt.weights.open import open_weights
from ktopt.weights.source import MissingTensor, StoredTensor, WeightError, WeightSource

_read: WeakKeyDictionary[ModuleGraph, dict[tuple[str, int], Mapping[str, StoredTensor]]] = WeakKeyDictionary()
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


def stored_for(model: Any, weights: Any, graph: ModuleGraph) -> Mapping[str, StoredTensor] | None:
    """stored_in `weights`, or in those that the model names itself. None where there are none, or where `weights` can't be read,
    which checking them reports."""
    if weights is None:
        own = weights_of(model)
        return None if own is None else stored_in(own, graph)
    try:
        return stored_in(weights, graph)
    except WeightError:
        return None


def storage_of(weights: str | Path | WeightSource, graph: ModuleGraph) -> Mapping[str, tuple[str, ...]]:
    """The storage types of each parameter of the tree that the weights hold: ("Q4_K",), or one for each part that it is joined of.
    WeightError as stored_in."""
    return {name: stored.types for name, stored in stored_in(weights, graph).items()}


def stored_in(weights: str | Path | WeightSource, graph: ModuleGraph) -> Mapping[str, StoredTensor]:
    """How each parameter of the tree is stored that the weights hold, or hold as another's tensor. WeightError for weights that
    can't be opened, or are of another model."""
    if not isinstance(weights, str | os.PathLike):
        return _read_headers(weights, graph)
    path = Path(weights)
    key = (str(path), path.stat().st_mtime_ns if path.exists() else 0)
    known = _read.setdefault(graph, {})
    if key not in known:
        source = open_weights(path, graph.config)
        try:
            known[key] = _read_headers(source, graph)
        finally:
            source.close()
    return known[key]


def _read_headers(source: WeightSource, graph: ModuleGraph) -> dict[str, StoredTensor]:
    found = {}
    for module in graph:
        prefix = f"{module.path}." if module.path else ""
        for tensor in module.parameters:
            name = prefix + tensor.name
            try:
                found[name] = source.stored(name)
            except MissingTensor:
                if name in graph.tied and graph.tied[name] in found:
                    found[name] = found[graph.tied[name]]
    return found
