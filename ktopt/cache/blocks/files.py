"""The file of one block: a header, then the parts of all layers and rows at places of their own.

    header    magic, version, model, layout, block, chain, sizes; the block's tokens; a checksum of each part; a checksum of itself
    layer 0   the parts of row 0, 1, ...; each layer begins at a multiple of 4,096 bytes, as direct reads need it
    layer 1   ...
    extra     bytes of whoever keeps the file for others (prefix.py): how many, and their checksum, is in the header

All numbers are little-endian. The header is written last: a file without one was never finished. A checksum is zlib's crc32, begun
with what the part is (model, layout, block, layer, row), so that a part of another place or file doesn't pass for this one.

Legend: L layers, R rows, T tokens of a block.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ktopt.cache.blocks.layout import BlockLayout
from ktopt.diagnostics import KtoptError

MAGIC = b"KTBLOCK\0"
VERSION = 1
PAGE = 4096
HASH_BYTES = 32
FIXED = struct.Struct("<8sII32s32sIQI")
"""Magic, version, header's bytes, FileShape.digest, chain, block, extra bytes, their checksum."""


class ForeignFile(Exception):
    """A file that isn't what it is taken for; the text says why, as what it does: 'ends early'."""


def rounded_to_page(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True)
class FileShape:
    """What all files of a cache have in common. `model_hash` tells a model's weights from all others'."""

    model_hash: str
    layout: BlockLayout
    layers: int
    rows: int

    @cached_property
    def digest(self) -> bytes:
        """Tells files of this shape from all others."""
        text = f"{self.model_hash}|{self.layout}|{self.layers}|{self.rows}"
        return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest()

    @cached_property
    def header_bytes(self) -> int:
        return rounded_to_page(FIXED.size + 8 * self.layout.tokens + 4 * self.layers * self.rows + 4)

    @cached_property
    def layer_bytes(self) -> int:
        return rounded_to_page(self.rows * self.layout.nbytes)

    @cached_property
    def nbytes(self) -> int:
        """Of a file without extra bytes."""
        return self.header_bytes + self.layers * self.layer_bytes

    def offset(self, layer: int, row: int) -> int:
        return self.header_bytes + layer * self.layer_bytes + row * self.layout.nbytes

    @cached_property
    def seed(self) -> int:
        """What checksums of parts begin with."""
        return zlib.crc32(self.digest)

    def checksum(self, block: int, layer: int, row: int, data: memoryview | bytes) -> int:
        """Of a part's bytes, as a part of this place."""
        return zlib.crc32(data, zlib.crc32(b"%d,%d,%d" % (block, layer, row), self.seed))


@dataclass(frozen=True)
class BlockHeader:
    """What a file says of itself. `chain` and `tokens` (T,) are zeros in files that aren't kept for others."""

    block: int
    checksums_LR: NDArray[np.uint32]
    chain: bytes = bytes(HASH_BYTES)
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    extra_bytes: int = 0
    extra_checksum: int = 0


def pack_header(shape: FileShape, header: BlockHeader) -> bytes:
    """`shape.header_bytes` bytes."""
    tokens = np.zeros(shape.layout.tokens, dtype="<i8")
    tokens[: len(header.tokens)] = header.tokens
    fixed = FIXED.pack(
        MAGIC,
        VERSION,
        shape.header_bytes,
        shape.digest,
        header.chain,
        header.block,
        header.extra_bytes,
        header.extra_checksum,
    )
    body = (fixed + tokens.tobytes() + header.checksums_LR.astype("<u4").tobytes()).ljust(shape.header_bytes - 4, b"\0")
    return body + struct.pack("<I", zlib.crc32(body))


def parse_header(shape: FileShape, data: bytes, file_bytes: int) -> BlockHeader:
    """What `pack_header` has packed. ForeignFile where that isn't this shape's, or not whole."""
    if len(data) < FIXED.size:
        raise ForeignFile("ends within its header")
    magic, version, header_bytes, digest, chain, block, extra_bytes, extra_checksum = FIXED.unpack_from(data)
    if magic != MAGIC:
        raise ForeignFile("isn't a file of a block, or was never finished")
    if version != VERSION:
        raise ForeignFile(f"has version {version} of the format, not {VERSION}")
    if digest != shape.digest:
        raise ForeignFile("is of another model or another layout of blocks")
    if header_bytes != shape.header_bytes or len(data) < header_bytes:
        raise ForeignFile("ends within its header")
    if zlib.crc32(data[: header_bytes - 4]) != struct.unpack_from("<I", data, header_bytes - 4)[0]:
        raise ForeignFile("has a damaged header")
    if file_bytes < shape.nbytes + extra_bytes:
        raise ForeignFile(f"ends after {file_bytes:,} of {shape.nbytes + extra_bytes:,} bytes")
    tokens_end = FIXED.size + 8 * shape.layout.tokens
    tokens = np.frombuffer(data, "<i8", shape.layout.tokens, FIXED.size)
    checksums = np.frombuffer(data, "<u4", shape.layers * shape.rows, tokens_end).reshape(shape.layers, shape.rows)
    return BlockHeader(block, checksums, chain, tokens, extra_bytes, extra_checksum)


def chain_hashes(shape: FileShape, tokens: Sequence[int] | NDArray[np.int64]) -> list[bytes]:
    """A hash for each whole block: of the shape and of all tokens up to the block's end."""
    per_block = shape.layout.tokens
    numbers = np.asarray(tokens, dtype="<i8")
    if numbers.ndim != 1:
        raise KtoptError(f"a prefix is one sequence of tokens, not an array of {numbers.ndim} dimensions")
    hashes, last = [], shape.digest
    for start in range(0, len(numbers) - per_block + 1, per_block):
        last = hashlib.blake2b(last + numbers[start : start + per_block].tobytes(), digest_size=HASH_BYTES).digest()
        hashes.append(last)
    return hashes
