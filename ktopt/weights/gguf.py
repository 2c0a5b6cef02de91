"""A reader of GGUF headers that believes nothing a file says before checking it against the file's size.

The file is mapped, never loaded. Opening walks the header once: metadata values are only skipped over and decoded when asked
for (a vocabulary of 49,000 tokens costs milliseconds), tensors are listed with their place in the file. Every count, length and
offset is checked before use; what is wrong raises WeightError that names the file and the key or tensor. `gguf.open_gguf` finds
all files of a split model from any of them. The format is that of ggml's docs/gguf.md, versions 2 and 3, little-endian.
Standard library only.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.weights.ggml_types import BY_NUMBER
from ktopt.weights.pages import map_file
from ktopt.weights.source import WeightError

if TYPE_CHECKING:
    import numpy

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ELEMENTS = 1 << 22  # in all arrays of a header together: one that takes over a second to walk is no model's
MAX_NAME_BYTES = 1 << 10
MAX_DIMENSIONS = 4

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
BOOL = 7
SCALAR_BYTES = {kind: struct.calcsize(code) for kind, code in SCALARS.items()}

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in a file.

    shape   in torch's order (GGUF writes the fastest dimension first)
    type    GGML's name of the storage type, such as "Q4_K"
    offset  of its first byte, from the start of the file
    part    index of the file among a split model's files
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    part: int


@dataclass(frozen=True, slots=True)
class _Value:
    """Where a metadata value lies: its type, and for an array its element type and count."""

    kind: int
    position: int
    element: int = 0
    count: int = 1


class _Header:
    """Walks the header of one mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position, self.end = path, data, 0, len(data)
        self.elements_left = MAX_ELEMENTS

    def fail(self, what: str) -> WeightError:
        return WeightError(f"{self.path}: {what} (at byte {min(self.position, self.end)} of {self.end})")

    def take(self, size: int, what: str) -> int:
        """The position of the next `size` bytes, which are then passed."""
        start = self.position
        if size > self.end - start:
            raise self.fail(f"the file ends inside {what}, which needs {size} bytes")
        self.position = start + size
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def name(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        if not 0 < length <= MAX_NAME_BYTES:
            raise self.fail(f"{what} has {length} bytes; 1 to {MAX_NAME_BYTES} are allowed")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def skip_string(self, what: str) -> None:
        self.take(self.u64(f"the length of {what}"), what)

    def skip_strings(self, count: int, what: str) -> None:
        """Pass `count` strings: a loop over lengths, kept tight because vocabularies are long."""
        if count * 8 > self.end - self.position:
            raise self.fail(f"{what} claims {count} strings, more than the file can hold")
        unpack, data, position = _U64.unpack_from, self.data, self.position
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):
            position = self.end + 1
        if position > self.end:
            raise self.fail(f"the file ends inside the strings of {what}")
        self.position = position

    def value(self, key: str) -> _Value:
        kind = self.u32(f"the type of {key}")
        if kind != ARRAY:
            start = self.position
            self.skip(kind, key)
            return _Value(kind, start)
        element, count = self.u32(f"the element type of {key}"), self.u64(f"the count of {key}")
        start = self.position
        if element == ARRAY:
            raise self.fail(f"{key} is an array of arrays, which no GGUF model needs")
        self.elements_left -= count
        if self.elements_left < 0:
            raise self.fail(f"{key} claims {count} elements, more than a model needs")
        if element == STRING:
            self.skip_strings(count, key)
        else:
            self.skip(element, key, count)
        return _Value(ARRAY, start, element, count)

    def skip(self, kind: int, key: str, count: int = 1) -> None:
        if kind == STRING:
            self.skip_string(key)
        elif kind in SCALAR_BYTES:
            self.take(SCALAR_BYTES[kind] * count, key)
        else:
            raise self.fail(f"{key} has the unknown value type {kind}")

    def tensor(self, part: int) -> GGUFTensor:
        """One tensor's entry; `offset` is still relative to the data section."""
        name = self.name("a tensor's name")
        rank = self.u32(f"the rank of tensor {name}")
        if not 0 < rank <= MAX_DIMENSIONS:
            raise self.fail(f"tensor {name} has {rank} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        sizes = [self.u64(f"the shape of tensor {name}") for _ in range(rank)]
        number, offset = self.u32(f"the type of tensor {name}"), self.u64(f"the offset of tensor {name}")
        if number not in BY_NUMBER:
            raise self.fail(f"tensor {name} has the unknown storage type {number}")
        kind, columns = BY_NUMBER[number], sizes[0]
        if 0 in sizes or columns % kind.block_elements:
            raise self.fail(f"tensor {name} has the shape {sizes[::-1]}, whose rows are no whole blocks of {kind.name}")
        nbytes = prod(sizes[1:]) * kind.row_bytes(columns)
        if nbytes > self.end:
            raise self.fail(f"tensor {name} of shape {sizes[::-1]} would take {nbytes} bytes, more than the file has")
        return GGUFTensor(name, tuple(reversed(sizes)), kind.name, offset, nbytes, part)


class Metadata(Mapping[str, Any]):
    """A file's metadata: values are decoded when asked for, and kept. Arrays are lists."""

    def __init__(self, path: Path, data: mmap.mmap, places: dict[str, _Value]) -> None:
        self._path, self._data, self._places = path, data, places
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._decode(key, self._places[key])
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def count(self, key: str) -> int:
        """The number of elements of an array, without decoding it; 1 for any other value."""
        return self._places[key].count

    def _decode(self, key: str, place: _Value) -> Any:
        try:
            if place.kind != ARRAY:
                return self._values(place.kind, place.position, 1)[0]
            return self._values(place.element, place.position, place.count)
        except UnicodeDecodeError:
            raise WeightError(f"{self._path}: the text of {key} is not UTF-8") from None
        except ValueError:
            if self._data.closed:
                raise WeightError(f"{self._path} was closed before {key} was read") from None
            raise

    def _values(self, kind: int, position: int, count: int) -> list[Any]:
        if kind == STRING:
            return self._strings(position, count)
        values = struct.unpack_from(f"<{count}{SCALARS[kind]}", self._data, position)
        return [v != 0 for v in values] if kind == BOOL else list(values)

    def _strings(self, position: int, count: int) -> list[str]:
        unpack, data, texts = _U64.unpack_from, self._data, []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            texts.append(data[start:position].decode())
        return texts


class GGUFPart:
    """One file: mapped, its header read and checked."""

    def __init__(self, path: Path, part: int = 0) -> None:
        self.path, self.part = path, part
        self.data = map_file(path, 24, "GGUF")
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        header = _Header(self.path, self.data)
        self.version = _version(header)
        tensor_count, key_count = header.u64("the tensor count"), header.u64("the key count")
        if tensor_count > min(MAX_TENSORS, header.end // 32) or key_count > min(MAX_KEYS, header.end // 13):
            raise header.fail(f"the header claims {tensor_count} tensors and {key_count} keys, more than the file can hold")
        places: dict[str, _Value] = {}
        for _ in range(key_count):
            key = header.name("a metadata key")
            if key in places:
                raise header.fail(f"the metadata key {key} stands twice")
            places[key] = header.value(key)
        self.metadata = Metadata(self.path, self.data, places)
        relative = [header.tensor(self.part) for _ in range(tensor_count)]
        self.alignment = self._alignment()
        self.data_start = header.position + -header.position % self.alignment
        self.tensors = self._place(relative)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise WeightError(f"{self.path}: general.alignment is {alignment!r}; it must be a power of two from 8 on")
        return alignment

    def _place(self, relative: list[GGUFTensor]) -> dict[str, GGUFTensor]:
        """Tensors by name with offsets from the start of the file, checked to lie in it, aligned and apart."""
        tensors: dict[str, GGUFTensor] = {}
        for t in relative:
            if t.name in tensors:
                raise WeightError(f"{self.path}: the tensor {t.name} stands twice")
            start = self.data_start + t.offset
            if t.offset % self.alignment:
                raise WeightError(f"{self.path}: tensor {t.name} lies at offset {t.offset}, not a multiple of {self.alignment}")
            if start + t.nbytes > len(self.data):
                raise WeightError(
                    f"{self.path}: tensor {t.name} ends at byte {start + t.nbytes}, but the file has {len(self.data)}: "
                    "it is truncated, download it again"
                )
            tensors[t.name] = GGUFTensor(t.name, t.shape, t.type, start, t.nbytes, t.part)
        ordered = sorted(tensors.values(), key=lambda t: t.offset)
        for before, after in pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                raise WeightError(f"{self.path}: the tensors {before.name} and {after.name} overlap at byte {after.offset}")
        return tensors

    def close(self) -> None:
        """Unmap the file; where arrays made from it are still in use, they keep the mapping until they go."""
        try:
            self.data.close()
        except BufferError:
            return


class GGUFFile:
    """A GGUF model of one file or several (a split model). `metadata` is the first file's, `tensors` are everybody's."""

    def __init__(self, parts: tuple[GGUFPart, ...]) -> None:
        self.parts = parts
        self.path = parts[0].path
        self.metadata = parts[0].metadata
        self.tensors: dict[str, GGUFTensor] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise WeightError(f"{part.path}: the tensor {name} is also in {parts[self.tensors[name].part].path.name}")
                self.tensors[name] = tensor

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(part.path for part in self.parts)

    @cached_property
    def architecture(self) -> str:
        """GGUF's name of the model's architecture, such as "llama" or "deepseek2"."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise WeightError(f"{self.path}: the metadata has no general.architecture, so it is no model")
        return value

    def file_of(self, tensor: GGUFTensor) -> Path:
        return self.parts[tensor.part].path

    def bytes_of(self, tensor: GGUFTensor) -> numpy.ndarray[Any, Any]:
        """The tensor's bytes as a read-only uint8 array in the mapping, shaped [..., bytes of a row]."""
        import numpy

        part = self.parts[tensor.part]
        if part.data.closed:
            raise WeightError(f"{part.path} was closed before {tensor.name} was read")
        flat = numpy.frombuffer(part.data, dtype=numpy.uint8, count=tensor.nbytes, offset=tensor.offset)
        return flat.reshape(*tensor.shape[:-1], -1)

    def close(self) -> None:
        for part in self.parts:
            part.close()


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file; of a split model, any of its files. WeightError for what is no GGUF, damaged, or lacks one of its files."""
    path = Path(path)
    first = GGUFPart(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return GGUFFile((first,))
    first.close()
    opened: list[GGUFPart] = []
    try:
        for index, name in enumerate(_split_paths(path, count)):
            opened.append(GGUFPart(name, index))
            _check_split(opened[-1], count)
        whole = GGUFFile(tuple(opened))
        expected = whole.metadata.get("split.tensors.count", len(whole.tensors))
        if expected != len(whole.tensors):
            raise WeightError(f"{path}: the split model should have {expected} tensors, its files have {len(whole.tensors)}")
        return whole
    except BaseException:
        for part in opened:
            part.close()
        raise


def _split_paths(path: Path, count: int) -> list[Path]:
    named = _SPLIT_NAME.fullmatch(path.name)
    if not named or int(named[3]) != count:
        raise WeightError(
            f"{path} is one of {count} files of a split model and must keep its name, such as model-00001-of-{count:05}.gguf"
        )
    paths = [path.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf") for number in range(1, count + 1)]
    missing = next((p for p in paths if not p.is_file()), None)
    if missing:
        raise WeightError(f"{missing} is missing: {path.name} is one of {count} files of a split model, which must lie together")
    return paths


def _check_split(part: GGUFPart, count: int) -> None:
    found = (part.metadata.get("split.no"), part.metadata.get("split.count"))
    if found != (part.part, count):
        raise WeightError(f"{part.path} should be file {part.part} of {count}, but says that it is {found[0]} of {found[1]}")


def _version(header: _Header) -> int:
    if header.data[:4] != b"GGUF":
        raise WeightError(f"{header.path} is not a GGUF file: it starts with {header.data[:4]!r}")
    header.position = 4
    version = header.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise WeightError(f"{header.path} is a big-endian GGUF file; only little-endian ones can be read")
    if version not in (2, 3):
        raise WeightError(f"{header.path} is GGUF version {version}; versions 2 and 3 can be read")
    return version
