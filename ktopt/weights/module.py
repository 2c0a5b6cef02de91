"""The weights of a model in hand, behind the interface of a weight file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.weights.source import MissingTensor, StoredTensor, WeightError

if TYPE_CHECKING:
    import torch
    from torch import nn

TYPE_NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int8": "I8", "int16": "I16", "int32": "I32",
    "int64": "I64", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class ModuleTensors:
    """The parameters and persistent buffers that `model` has now; modules swapped out of it later stay readable here.

    `read` gives the model's own tensor where dtype and device are the wanted ones, else a converted copy.
    """

    def __init__(self, model: nn.Module) -> None:
        self.path = Path(f"<{type(model).__name__} in memory>")
        self._model_config: Any = getattr(model, "config", None)
        persistent = model.state_dict(keep_vars=True)
        self._tensors: dict[str, torch.Tensor] = {k: v for k, v in persistent.items() if hasattr(v, "dtype")}
        self._stored_as: dict[int, str] = {}
        for name, tensor in self._tensors.items():
            self._stored_as.setdefault(id(tensor), name)

    @property
    def files(self) -> tuple[Path, ...]:
        return ()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def stored(self, name: str) -> StoredTensor:
        tensor = self._needed(name)
        kind = str(tensor.dtype).removeprefix("torch.")
        return StoredTensor(
            name,
            (self._stored_as[id(tensor)],),
            tuple(tensor.shape),
            (TYPE_NAMES.get(kind, kind),),
            tensor.numel() * tensor.element_size(),
            self.path,
        )

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        tensor = self._needed(name)
        if tensor.is_meta:
            raise WeightError(f"{self.path}: {name} has no data, it is on the meta device; name a weight file")
        return tensor.detach().to(device=device, dtype=dtype)

    def config(self) -> Mapping[str, Any] | None:
        return self._model_config.to_dict() if hasattr(self._model_config, "to_dict") else None

    def release(self, name: str) -> None:
        """Let go of one tensor, which has been read."""
        self._tensors.pop(name, None)

    def close(self) -> None:
        """Let go of the tensors."""
        self._tensors = {}

    def _needed(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise MissingTensor(f"{self.path} has no parameter {name}")
        return self._tensors[name]
