"""Which tensors of a Hugging Face checkpoint a parameter of today's transformers model is made of.

Published checkpoints are older than transformers v5, which fuses experts: there each expert has its own matrices, Mixtral's
under block_sparse_moe with the names w1, w3, w2. Both that and the fused form are read. Other differences: a tied lm_head that
isn't stored, a prefix more or less, and DeepSeek's FP8 matrices with a scale a block beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ktopt.weights.recipes import Part, Recipe
from ktopt.weights.safetensors import SafeTensor
from ktopt.weights.source import WeightError

GATE_UP = (("gate_proj", "up_proj"), ("w1", "w3"))
DOWN = ("down_proj", "w2")
SCALE = "_scale_inv"
PREFIXES = ("model.language_model.", "language_model.model.", "")
_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class CheckpointNames:
    """Recipes for a model's parameters from the tensors of a checkpoint. `config` tells of tied embeddings and block sizes."""

    def __init__(self, tensors: Mapping[str, SafeTensor], config: Mapping[str, Any], where: str) -> None:
        self.tensors, self.config, self.where = tensors, config, where

    def names(self) -> Iterator[str]:
        """The model's names of what the checkpoint holds, each once; layers beyond the model's (MTP) are left out."""
        layers = self.config.get("num_hidden_layers")
        seen = set()
        for stored in self.tensors:
            name = self._model_name(stored)
            layer = _LAYER.match(name)
            beyond = layer and isinstance(layers, int) and int(layer[1]) >= layers
            if name not in seen and not beyond and not name.endswith(SCALE) and self.recipe(name):
                seen.add(name)
                yield name
        if "lm_head.weight" not in seen and self.recipe("lm_head.weight"):
            yield "lm_head.weight"

    def _model_name(self, stored: str) -> str:
        name = stored.replace(".block_sparse_moe.", ".mlp.")
        for prefix in PREFIXES[:2]:
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
        name = name.removeprefix("language_model.")
        if name.startswith(("layers.", "embed_tokens.", "norm.")):
            name = "model." + name
        if expert := _EXPERT.fullmatch(name):
            return f"{expert[1]}.{'down_proj' if expert[2] in DOWN else 'gate_up_proj'}"
        return name

    def recipe(self, name: str) -> Recipe | None:
        """How the parameter is made; None where the checkpoint lacks a part of it."""
        for stem in self._spellings(name):
            if stem in self.tensors:
                tensor = self.tensors[stem]
                return Recipe(tensor.shape, tensor.shape, (self._part(tensor),))
            if experts := _EXPERTS.fullmatch(stem):
                found = self._down(experts[1]) if experts[2] == "down_proj" else self._gate_up(experts[1])
                if found:
                    return found
        if name == "lm_head.weight" and self.config.get("tie_word_embeddings", True):
            return self.recipe("model.embed_tokens.weight")
        return None

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        local = name.removeprefix("model.")
        if local != name:
            yield from (prefix + local for prefix in PREFIXES)
            if ".mlp." in name:
                yield name.replace(".mlp.", ".block_sparse_moe.", 1)
        else:
            yield f"language_model.{name}"

    def _part(self, tensor: SafeTensor, at: tuple[int | slice, ...] = ()) -> Part:
        return Part(tensor.name, at, scale=tensor.name + SCALE if tensor.name + SCALE in self.tensors else "")

    def _each(self, experts: str, leaf: str) -> list[SafeTensor]:
        found: list[SafeTensor] = []
        while tensor := self.tensors.get(f"{experts}.{len(found)}.{leaf}.weight"):
            found.append(tensor)
        return found

    def _gate_up(self, experts: str) -> Recipe | None:
        for gate_name, up_name in GATE_UP:
            gates, ups = self._each(experts, gate_name), self._each(experts, up_name)
            if gates and len(gates) == len(ups):
                inner, hidden = self._shape(gates + ups)
                parts = []
                for expert, (gate, up) in enumerate(zip(gates, ups, strict=True)):
                    parts.append(self._part(gate, (expert, slice(0, inner))))
                    parts.append(self._part(up, (expert, slice(inner, None))))
                whole = (len(gates), 2 * inner, hidden)
                return Recipe(whole, whole, tuple(parts))
        return None

    def _down(self, experts: str) -> Recipe | None:
        for leaf in DOWN:
            if downs := self._each(experts, leaf):
                whole = (len(downs), *self._shape(downs))
                return Recipe(whole, whole, tuple(self._part(t, (expert,)) for expert, t in enumerate(downs)))
        return None

    def _shape(self, tensors: list[SafeTensor]) -> tuple[int, int]:
        shape = tensors[0].shape
        for tensor in tensors:
            if len(shape) != 2 or tensor.shape != shape:
                raise WeightError(
                    f"{self.where}: {tensor.name} has the shape {list(tensor.shape)} and {tensors[0].name} {list(shape)}; "
                    "a layer's experts must be matrices of one shape"
                )
        return shape[0], shape[1]
