"""Reads safetensors headers, checking them against the file before anything is used; data stays in the mapped file.

The format: eight bytes with the header's length, a JSON object of name -> {dtype, shape, data_offsets}, then the data.
`open_files` opens one file, or all shards of a folder with their index. How a model's parameters are made of these tensors is
checkpoint_names.py's part. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ktopt.weights.pages import map_file
from ktopt.weights.source import WeightError

if TYPE_CHECKING:
    import numpy

MAX_HEADER_BYTES = 1 << 25
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor in a file; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class SafetensorsFile:
    """One mapped file. WeightError names it and the tensor where the header is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = map_file(path, 10, "safetensors")
        try:
            self.tensors = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> dict[str, SafeTensor]:
        length = int.from_bytes(self.data[:8], "little")
        if length > min(MAX_HEADER_BYTES, len(self.data) - 8):
            raise WeightError(f"{self.path}: the header claims {length} bytes, more than the file has or a header needs")
        header = _json(self.data[8 : 8 + length], f"{self.path}: the header")
        start = 8 + length
        tensors = {name: self._tensor(name, entry, start) for name, entry in header.items() if name != "__metadata__"}
        ordered = sorted((t for t in tensors.values() if t.nbytes), key=lambda t: t.offset)
        for before, after in pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                raise WeightError(f"{self.path}: the tensors {before.name} and {after.name} overlap at byte {after.offset}")
        return tensors

    def _tensor(self, name: str, entry: Any, start: int) -> SafeTensor:
        entry = entry if isinstance(entry, dict) else {}
        kind, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(kind, str) or kind not in ITEM_BYTES:
            raise WeightError(f"{self.path}: tensor {name} has the unknown dtype {kind!r}")
        if not _sizes(shape) or not _sizes(place) or len(place) != 2 or len(shape) > 8:
            raise WeightError(f"{self.path}: tensor {name} has no proper shape and data_offsets")
        nbytes = prod(shape) * ITEM_BYTES[kind]
        if place[1] - place[0] != nbytes:
            raise WeightError(
                f"{self.path}: tensor {name} of shape {shape} needs {nbytes} bytes, its offsets {place} hold another number"
            )
        if start + place[1] > len(self.data):
            raise WeightError(
                f"{self.path}: tensor {name} ends at byte {start + place[1]}, but the file has {len(self.data)}: "
                "it is truncated, download it again"
            )
        return SafeTensor(name, tuple(shape), kind, start + place[0], nbytes)

    def bytes_of(self, tensor: SafeTensor) -> numpy.ndarray[Any, Any]:
        """The tensor's bytes as a read-only uint8 array in the mapping, shaped [..., bytes of a row]."""
        import numpy

        if self.data.closed:
            raise WeightError(f"{self.path} was closed before {tensor.name} was read")
        flat = numpy.frombuffer(self.data, dtype=numpy.uint8, count=tensor.nbytes, offset=tensor.offset)
        return flat.reshape(*tensor.shape[:-1], (tensor.shape[-1] if tensor.shape else 1) * ITEM_BYTES[tensor.type])

    def close(self) -> None:
        """Unmap the file; where arrays made from it are still in use, they keep the mapping until they go."""
        try:
            self.data.close()
        except BufferError:
            return


def open_files(path: Path) -> tuple[SafetensorsFile, ...]:
    """The file, or all safetensors files of a folder: those of its index, else every one."""
    paths = _listed(path) if path.is_dir() else [path]
    opened: list[SafetensorsFile] = []
    seen: dict[str, Path] = {}
    try:
        for each in paths:
            opened.append(SafetensorsFile(each))
            for name in opened[-1].tensors:
                if name in seen:
                    raise WeightError(f"{each}: the tensor {name} is also in {seen[name].name}")
                seen[name] = each
        if path.is_dir():
            _check_index(path, seen)
    except BaseException:
        for file in opened:
            file.close()
        raise
    return tuple(opened)


def _index(folder: Path) -> Mapping[str, str]:
    """The index's map from tensor to file name, empty without an index."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise WeightError(f"{index} is larger than any index of a model")
    weight_map = _json(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightError(f"{index}: tensor {name} is said to be in {file!r}, which is no safetensors file of this folder")
    return weight_map


def _listed(folder: Path) -> list[Path]:
    names = sorted(set(_index(folder).values())) or sorted(p.name for p in folder.glob("*.safetensors"))
    paths = [folder / name for name in names]
    missing = next((p for p in paths if not p.is_file()), None)
    if missing:
        raise WeightError(f"{missing} is missing; {folder / INDEX} names it as one of {len(paths)} files")
    return paths


def _check_index(folder: Path, seen: Mapping[str, Path]) -> None:
    for name, file in _index(folder).items():
        if name not in seen or seen[name].name != file:
            raise WeightError(f"{folder / file} lacks the tensor {name}, which {INDEX} says is in it")


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _json(text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise WeightError(f"{what} names {next(n for n in names if names.count(n) > 1)!r} twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{what} is no proper JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise WeightError(f"{what} is no JSON object")
    return value
