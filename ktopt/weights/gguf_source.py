"""A GGUF model as a WeightSource: parameters by transformers' names, read one at a time from the mapped file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.weights.agreement import Contradiction, gguf_contradictions
from ktopt.weights.gguf import GGUFFile, open_gguf
from ktopt.weights.gguf_config import config_from_gguf
from ktopt.weights.names import GGUFNames, check_model_type
from ktopt.weights.pages import drop_pages
from ktopt.weights.recipes import Part, RecipeBook, alternated, assemble, gathered
from ktopt.weights.source import StoredTensor, WeightError

if TYPE_CHECKING:
    import numpy
    import torch

NO_PARAMETERS = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")
"""Tensors that converters add and whose values follow from the config."""
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_SPLIT_KV_B = ("attn_k_b.weight", "attn_v_b.weight")
"""The same values as attn_kv_b, in the form that llama.cpp computes with."""


class GGUFSource:
    """The weights in a GGUF file, or in the files of a split model. `config` is the model's, to refuse a file of another model."""

    def __init__(self, path: str | Path, config: Mapping[str, Any] | None = None) -> None:
        self.file: GGUFFile = open_gguf(path)
        try:
            check_model_type(self.file.architecture, str((config or {}).get("model_type", "")), str(self.file.path))
            self._names = GGUFNames(self.file)
        except BaseException:
            self.file.close()
            raise
        self.path = Path(path)
        self._recipes = RecipeBook(self._names.recipe, self._missing)

    @property
    def files(self) -> tuple[Path, ...]:
        return self.file.files

    def __contains__(self, name: str) -> bool:
        return self._recipes.get(name) is not None

    def names(self) -> Iterator[str]:
        return self._names.names()

    def stored(self, name: str) -> StoredTensor:
        recipe = self._recipes.needed(name)
        tensors = [self.file.tensors[part.stored] for part in recipe.parts]
        return StoredTensor(
            name,
            tuple(t.name for t in tensors),
            recipe.shape,
            tuple(t.type for t in tensors),
            sum(t.nbytes for t in tensors),
            self.file.file_of(tensors[0]),
            recipe.as_stored,
            not recipe.after and [part.transposed for part in recipe.parts] == [True, False],
        )

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        recipe = self._recipes.needed(name)
        try:
            return assemble(recipe, self._fetch, dtype, device)
        except WeightError as error:
            raise WeightError(f"{self.path}: {name}: {error}") from None
        finally:
            for part in recipe.parts:
                self._drop(part)

    def raw(self, name: str) -> list[tuple[str, tuple[int, ...], numpy.ndarray[Any, Any]]]:
        recipe = self._recipes.needed(name)
        if not recipe.as_stored:
            raise WeightError(f"{self.path}: {name} can't be handed out as stored: the file has it transposed or shifted, use read")
        parts = [self._raw(part) for part in recipe.parts]
        return alternated(recipe, parts) if recipe.alternates else parts

    def _raw(self, part: Part) -> tuple[str, tuple[int, ...], numpy.ndarray[Any, Any]]:
        raw, kind, shape = self._fetch(part.stored)
        made = gathered(part, raw, kind, shape)
        if part.rows is not None:  # a copy was made
            self._drop(part)
        return kind, shape, made

    def pieces(self, name: str) -> list[tuple[str, tuple[int, ...], bool, numpy.ndarray[Any, Any]]]:
        """What the parameter is made of, as (type, shape, whether its last two dimensions stand the other way round, mapped bytes):
        for an operator that computes on them in another form than the model's. WeightError where that takes arithmetic."""
        recipe = self._recipes.needed(name)
        if recipe.after or any(part.scale or part.rows for part in recipe.parts):
            raise WeightError(f"{self.path}: {name} is made by arithmetic or in another order, use read")
        fetched = [(part, *self._fetch(part.stored)) for part in recipe.parts]
        return [(kind, shape, part.transposed, raw) for part, raw, kind, shape in fetched]

    def config(self) -> Mapping[str, Any]:
        """The model's config in transformers' terms, from the metadata."""
        return config_from_gguf(self.file)

    def contradictions(self, config: Mapping[str, Any]) -> list[Contradiction]:
        """Where the metadata and a model's config differ."""
        return gguf_contradictions(self.file, config)

    def unused(self, names: Iterable[str]) -> dict[str, Path]:
        """The stored tensors that none of these parameters is made of, and their files. Left out is what no model has as a
        parameter, and what belongs to layers that predict further tokens."""
        used = {part.stored for name in names if (recipe := self._recipes.get(name)) for part in recipe.parts}
        further = self.file.metadata.get(f"{self.file.architecture}.nextn_predict_layers", 0)
        blocks = self.file.metadata.get(f"{self.file.architecture}.block_count", 0)

        def known(stored: str) -> bool:
            inside = _IN_BLOCK.fullmatch(stored)
            if NO_PARAMETERS.fullmatch(stored) or inside is None:
                return NO_PARAMETERS.fullmatch(stored) is not None
            if inside[2] in _SPLIT_KV_B and f"blk.{inside[1]}.attn_kv_b.weight" in used:
                return True
            return isinstance(blocks, int) and isinstance(further, int) and blocks - further <= int(inside[1]) < blocks

        return {n: self.file.file_of(t) for n, t in self.file.tensors.items() if n not in used and not known(n)}

    def close(self) -> None:
        self.file.close()

    def _fetch(self, stored: str) -> tuple[numpy.ndarray[Any, Any], str, tuple[int, ...]]:
        tensor = self.file.tensors[stored]
        return self.file.bytes_of(tensor), tensor.type, tensor.shape

    def _drop(self, part: Part) -> None:
        """Give back the pages of a stored tensor."""
        tensor = self.file.tensors[part.stored]
        drop_pages(self.file.parts[tensor.part].data, tensor.offset, tensor.nbytes)

    def _missing(self, name: str) -> str:
        return f"{self.path} has no {self._names.stored_name(name) or 'tensor'} for the parameter {name}"
