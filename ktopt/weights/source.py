"""The protocol of a weight file, and its errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ktopt.diagnostics import KtoptError

if TYPE_CHECKING:
    import numpy
    import torch

WHOLE_NUMBERS = frozenset({"I8", "I16", "I32", "I64", "U8", "BOOL"})
"""Storage types that floating-point parameters aren't made of: some quantisation's, whose scales and zeros would be lost."""


class WeightError(KtoptError):
    """A weight file is damaged, truncated, of the wrong model or of a type that can't be read. Names file and tensor."""


class MissingTensor(WeightError):
    """A tensor that the model needs is not in the file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """How a parameter is stored, from headers alone.

    name      the model's parameter name, such as "model.layers.0.self_attn.q_proj.weight"
    stored    the file's names of its parts, in the order in which they are joined (experts' gate and up are two parts)
    shape     the parameter's shape in the model
    types     storage type of each part, as the format names it ("Q4_1", "BF16", "F32")
    nbytes    bytes in the file, all parts
    file      where the first part lies
    in_place  whether `raw` hands it out: the parts are the parameter's own rows, not transposed, shifted or scaled beside
    in_two    whether it is a kv_b_proj in two pieces, keys the other way round and values, which latent attention takes as they are
    """

    name: str
    stored: tuple[str, ...]
    shape: tuple[int, ...]
    types: tuple[str, ...]
    nbytes: int
    file: Path
    in_place: bool = True
    in_two: bool = False


class WeightSource(Protocol):
    """Weights of one model. Opened by `ktopt.weights.open.open_weights(path, config)`."""

    path: Path

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file, in order."""
        ...

    def __contains__(self, name: str) -> bool:
        """Whether the parameter `name` can be read."""
        ...

    def names(self) -> Iterator[str]:
        """The model parameter names that the source holds."""
        ...

    def stored(self, name: str) -> StoredTensor:
        """How it is stored. MissingTensor if it isn't."""
        ...

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """The parameter, dequantised, permuted and joined as the model wants it, in a fresh tensor of `dtype` on `device`."""
        ...

    def raw(self, name: str) -> list[tuple[str, tuple[int, ...], numpy.ndarray[Any, Any]]]:
        """The stored parts as (type, logical shape, mapped bytes), in the model's row order; no copy where none is needed. For
        operators that compute on quantised weights in place."""
        ...

    def config(self) -> Mapping[str, Any] | None:
        """The model's config in transformers' terms if the source carries one (GGUF metadata, or a config.json beside it)."""
        ...

    def close(self) -> None: ...
