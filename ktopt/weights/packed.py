"""One safetensors file that holds a model's weights as another format stored them: `ktopt apply --copy` writes it.

A parameter keeps its stored bytes: each part of it is a U8 tensor, and the file's metadata says its type, its shape, and how parts
are joined. One that can't be handed out as stored (transposed, shifted, joined crosswise) is written in the plan's dtype.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.weights.pages import drop_pages
from ktopt.weights.safetensors import SafetensorsFile
from ktopt.weights.source import MissingTensor, StoredTensor, WeightError

if TYPE_CHECKING:
    import numpy
    import torch

    from ktopt.weights.source import WeightSource

    Bytes = numpy.ndarray[Any, Any]

KEY = "ktopt.packed"
TYPE_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packed:
    """A parameter of `shape`: (type, shape) of each part, joined along `axis`."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    axis: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"shape": self.shape, "axis": self.axis, "parts": self.parts}


def write_packed(
    path: Path, source: WeightSource, dtypes: Mapping[str, str], written: Callable[[str, int, int], None] | None = None
) -> None:
    """Write the parameters that `dtypes` names, one at a time; it gives what one is held in that can't be kept as stored.
    `written` is called after each, with its name, the bytes written so far and those of all."""
    layout = {name: _plan_one(source, name, dtype) for name, dtype in dtypes.items()}
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", KEY: json.dumps({name: packed.to_json() for name, (packed, _) in layout.items()})}
    }
    offset = 0
    for name, (_, sizes) in layout.items():
        for index, size in enumerate(sizes):
            header[f"{name}:{index}"] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
            offset += size
    total, done = offset, 0
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, (packed, sizes) in layout.items():
            for part, size in zip(_parts(source, name, packed, dtypes[name]), sizes, strict=True):
                if part.nbytes != size:
                    raise WeightError(f"{source.path}: {name} changed while it was read")
                out.write(part.reshape(-1).data)
                done += size
            if written:
                written(name, done, total)


def _plan_one(source: WeightSource, name: str, dtype: str) -> tuple[Packed, list[int]]:
    """How a parameter will lie in the file, and the bytes of each part."""
    shape = source.stored(name).shape
    try:
        raw = source.raw(name)
    except WeightError:
        raw = []
    axis = joint_axis(shape, [part for _, part, _ in raw])
    if axis is not None:
        return Packed(shape, tuple((kind, part) for kind, part, _ in raw), axis), [data.nbytes for _, _, data in raw]
    kind = TYPE_NAMES[dtype]
    return Packed(shape, ((kind, shape),)), [prod(shape) * (int(kind.lstrip("BFI")) // 8)]


def joint_axis(shape: Sequence[int], parts: Sequence[Sequence[int]]) -> int | None:
    """The axis along which parts of these shapes join to `shape`; None where they don't, or not in order along one axis."""
    if len(parts) == 1:
        return 0 if prod(parts[0]) == prod(shape) else None
    for axis, size in enumerate(shape):
        others = [*shape[:axis], *shape[axis + 1 :]]
        if parts and all(len(p) == len(shape) and [*p[:axis], *p[axis + 1 :]] == others for p in parts):
            return axis if sum(p[axis] for p in parts) == size else None
    return None


def _parts(source: WeightSource, name: str, packed: Packed, dtype: str) -> Iterator[Bytes]:
    import torch

    try:
        raw = source.raw(name)
    except WeightError:
        raw = []
    if tuple((kind, shape) for kind, shape, _ in raw) == packed.parts:
        for _, _, data in raw:
            yield data
        return
    tensor = source.read(name, getattr(torch, dtype))
    yield tensor.reshape(-1).contiguous().view(torch.uint8).numpy()


class PackedWeights:
    """A WeightSource over a file that write_packed wrote. WeightError where it isn't one, or is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SafetensorsFile(path)
        self._packed = _read_layout(self._file)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def __contains__(self, name: str) -> bool:
        return name in self._packed

    def names(self) -> Iterator[str]:
        return iter(self._packed)

    def stored(self, name: str) -> StoredTensor:
        packed = self._needed(name)
        stored = tuple(f"{name}:{index}" for index in range(len(packed.parts)))
        nbytes = sum(self._file.tensors[each].nbytes for each in stored)
        return StoredTensor(name, stored, packed.shape, tuple(kind for kind, _ in packed.parts), nbytes, self.path)

    def raw(self, name: str) -> list[tuple[str, tuple[int, ...], Bytes]]:
        parts = self._needed(name).parts
        return [(kind, shape, self._bytes(f"{name}:{index}", shape)) for index, (kind, shape) in enumerate(parts)]

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        import torch

        from ktopt.weights.dequantize import dequantize_into

        packed = self._needed(name)
        whole = torch.empty(packed.shape, dtype=dtype, device=device)
        out = whole.view(packed.parts[0][1]) if len(packed.parts) == 1 else whole
        start = 0
        for index, (kind, shape) in enumerate(packed.parts):
            length = shape[packed.axis] if shape else 1
            into = out.narrow(packed.axis, start, length) if shape else out
            try:
                dequantize_into(into, self._bytes(f"{name}:{index}", shape), kind)
            except (WeightError, ValueError) as error:
                raise WeightError(f"{self.path}: {name}: {error}") from None
            finally:
                stored = self._file.tensors[f"{name}:{index}"]
                drop_pages(self._file.data, stored.offset, stored.nbytes)
            start += length
        return whole

    def unused(self, names: Iterable[str]) -> dict[str, Path]:
        """What is stored beside these parameters."""
        return dict.fromkeys(self._packed.keys() - set(names), self.path)

    def config(self) -> None:
        """None: config.json beside the file has it."""

    def close(self) -> None:
        self._file.close()

    def _bytes(self, stored: str, shape: tuple[int, ...]) -> Bytes:
        return self._file.bytes_of(self._file.tensors[stored]).reshape(*shape[:-1], -1)

    def _needed(self, name: str) -> Packed:
        if name not in self._packed:
            raise MissingTensor(f"{self.path} has no {name}")
        return self._packed[name]


def _read_layout(file: SafetensorsFile) -> dict[str, Packed]:
    length = int.from_bytes(file.data[:8], "little")
    try:
        entries = json.loads(json.loads(file.data[8 : 8 + length])["__metadata__"][KEY])
        layout = {
            name: Packed(tuple(entry["shape"]), tuple((kind, tuple(shape)) for kind, shape in entry["parts"]), entry["axis"])
            for name, entry in entries.items()
        }
        for name, packed in layout.items():
            if joint_axis(packed.shape, [shape for _, shape in packed.parts]) != packed.axis:
                raise ValueError(f"the parts of {name} don't join to its shape")
            for index in range(len(packed.parts)):
                file.tensors[f"{name}:{index}"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        file.close()
        raise WeightError(f"{file.path}: not weights that `ktopt apply --copy` wrote, or damaged: {error}") from None
    return layout
