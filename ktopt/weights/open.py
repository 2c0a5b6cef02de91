"""Opens weights of any kind, and checks them against what a model wants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktopt.weights.gguf_source import GGUFSource
from ktopt.weights.module import ModuleTensors
from ktopt.weights.safetensors_source import SafetensorsSource
from ktopt.weights.source import WeightError, WeightSource

__all__ = ["ModuleTensors", "check_complete", "open_weights"]
INDEX_SUFFIX = ".safetensors.index.json"


def open_weights(path: str | Path, config: Mapping[str, Any] | None = None) -> WeightSource:
    """Open a GGUF file (or one of a split model), a safetensors file, or a folder with either.

    `config` is the model's, in transformers' terms; the default is the source's own. WeightError for what holds no weights, is
    damaged, or is of another architecture than the config.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, config)
    if not path.is_file():
        raise WeightError(f"{path} does not exist; weights are a GGUF file, a safetensors file, or a folder with either")
    if path.name.endswith(INDEX_SUFFIX):
        return SafetensorsSource(path.parent, config)
    if path.suffix == ".safetensors":
        return SafetensorsSource(path, config)
    return GGUFSource(path, config)


def _open_folder(folder: Path, config: Mapping[str, Any] | None) -> WeightSource:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        source = GGUFSource(ggufs[0], config)
        others = [p.name for p in ggufs if p not in source.files]
        if others:
            source.close()
            raise WeightError(f"{folder} has several GGUF models ({ggufs[0].name}, {others[0]}); name the file that you mean")
        return source
    if any(folder.glob("*.safetensors")) or any(folder.glob("*" + INDEX_SUFFIX)):
        return SafetensorsSource(folder, config)
    raise WeightError(f"{folder} has neither GGUF nor safetensors files in it")


def check_complete(source: WeightSource, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What stands in the way of loading parameters of these shapes from `source`: one sentence for each tensor that is missing
    or has another shape, naming it and the file. Reads headers only."""
    problems = []
    for name, shape in wanted.items():
        try:
            stored = source.stored(name)
        except WeightError as error:
            problems.append(str(error))
            continue
        if tuple(stored.shape) != tuple(shape):
            problems.append(
                f"{stored.file}: {stored.stored[0]} makes {name} of shape {list(stored.shape)}, but the model wants {list(shape)}"
            )
    return problems
