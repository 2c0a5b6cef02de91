"""A safetensors file or folder as a WeightSource: parameters by transformers' names, read one at a time from the mapped files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.weights.agreement import Contradiction, config_contradictions
from ktopt.weights.checkpoint_names import SCALE, CheckpointNames
from ktopt.weights.pages import drop_pages
from ktopt.weights.recipes import RecipeBook, assemble
from ktopt.weights.safetensors import SafetensorsFile, open_files
from ktopt.weights.source import StoredTensor, WeightError

if TYPE_CHECKING:
    import numpy
    import torch

MAX_CONFIG_BYTES = 1 << 22
NO_PARAMETERS = re.compile(
    r"(.*\.)?(rotary_emb|rotary_pos_emb|rope)\.inv_freq"  # computed from the config, and stored by old versions of transformers
    r"|(.*\.)?(position_ids|masked_bias)"  # likewise: positions, and what attention masks with
    r"|(model\.)?(vision_tower|multi_modal_projector)\..+"  # the other parts of a model of several, whose language model is read
)
"""Tensors of checkpoints that no language model has as a parameter."""
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\..+")
UNSCALED = ("F8_E4M3", "F8_E5M2")
"""Types whose numbers mean nothing without the scales beside them."""


class SafetensorsSource:
    """The weights in a safetensors file, or in all of a folder. `config` is the model's, by default the config.json beside them."""

    def __init__(self, path: str | Path, config: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._files = open_files(self.path)
        self._holder: dict[str, SafetensorsFile] = {name: file for file in self._files for name in file.tensors}
        tensors = {name: file.tensors[name] for name, file in self._holder.items()}
        try:
            self._config = _config_beside(self.path)
            known = config if config is not None else self._config or {}
            self._known = known
            self._block = _block_size(known) or _block_size(self._config or {}) or (128, 128)
        except BaseException:
            self.close()
            raise
        self._names = CheckpointNames(tensors, known, str(self.path))
        self._recipes = RecipeBook(self._names.recipe, lambda name: f"{self.path} has no tensor for the parameter {name}")

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self._files)

    def __contains__(self, name: str) -> bool:
        return self._recipes.get(name) is not None

    def names(self) -> Iterator[str]:
        return self._names.names()

    def stored(self, name: str) -> StoredTensor:
        recipe = self._recipes.needed(name)
        parts = [self._holder[part.stored].tensors[part.stored] for part in recipe.parts]
        return StoredTensor(
            name,
            tuple(t.name for t in parts),
            recipe.shape,
            tuple(t.type for t in parts),
            sum(t.nbytes for t in parts),
            self._holder[parts[0].name].path,
            recipe.as_stored,
        )

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        recipe = self._recipes.needed(name)
        try:
            return assemble(recipe, self._fetch, dtype, device, self._block)
        except WeightError as error:
            raise WeightError(f"{self.path}: {name}: {error}") from None
        finally:
            for part in recipe.parts:
                file = self._holder[part.stored]
                drop_pages(file.data, file.tensors[part.stored].offset, file.tensors[part.stored].nbytes)

    def raw(self, name: str) -> list[tuple[str, tuple[int, ...], numpy.ndarray[Any, Any]]]:
        recipe = self._recipes.needed(name)
        if not recipe.as_stored:
            raise WeightError(f"{self.path}: {name} can't be handed out as stored: it has scales beside it, use read")
        fetched = (self._fetch(part.stored) for part in recipe.parts)
        return [(kind, shape, raw) for raw, kind, shape in fetched]

    def config(self) -> Mapping[str, Any] | None:
        """The config.json beside the weights, None where there is none."""
        return self._config

    def contradictions(self, config: Mapping[str, Any]) -> list[Contradiction]:
        """Where the config.json beside the weights and a model's config differ."""
        return config_contradictions(self._config or {}, config)

    def unscaled(self, name: str) -> str:
        """Why the numbers of a parameter mean nothing as they are stored, or ""."""
        for part in self._recipes.needed(name).parts:
            file = self._holder[part.stored]
            kind = file.tensors[part.stored].type
            if kind in UNSCALED and not part.scale:
                return f"{file.path}: {part.stored} is {kind} without its scales: the file has no {part.stored}{SCALE}"
        return ""

    def unused(self, names: Iterable[str]) -> dict[str, Path]:
        """The stored tensors that none of these parameters is made of, and their files. Left out is what no model has as a
        parameter, and what belongs to layers that predict further tokens, of which the config tells."""
        parts = [part for name in names if (recipe := self._recipes.get(name)) for part in recipe.parts]
        used = {part.stored for part in parts} | {part.scale for part in parts}
        layers, further = (self._known.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
        predicting = range(layers, layers + further) if isinstance(layers, int) and isinstance(further, int) else range(0)

        def known(stored: str) -> bool:
            layer = _IN_LAYER.fullmatch(stored)
            return NO_PARAMETERS.fullmatch(stored) is not None or (layer is not None and int(layer[1]) in predicting)

        return {name: file.path for name, file in self._holder.items() if name not in used and not known(name)}

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _fetch(self, stored: str) -> tuple[numpy.ndarray[Any, Any], str, tuple[int, ...]]:
        file = self._holder[stored]
        tensor = file.tensors[stored]
        return file.bytes_of(tensor), tensor.type, tensor.shape


def _config_beside(path: Path) -> Mapping[str, Any] | None:
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return None
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise WeightError(f"{file} is larger than any model's config")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{file} is no proper JSON: {str(error)[:100]}") from None
    if not isinstance(config, dict):
        raise WeightError(f"{file} is no JSON object")
    return config


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share one scale in an FP8 checkpoint."""
    quantization = config.get("quantization_config")
    size = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        return None
    return (size[0], size[1])
