"""The compact form of a module tree on disk: shipped trees and the cache of built ones.

Subtrees that are alike are stored once, and runs of numbered children (decoder layers) as a range, so that DeepSeek-V3's 1,215
modules take two kilobytes. JSON, compressed with gzip:

    classes   [[dotted name, *rest of the MRO], ...]
    tensors   [[[name, shape, dtype, buffer], ...], ...]      what a module owns itself
    nodes     [[class, tensors, children], ...]               indices; children stand before their parents, the root is the last
    tied      {parameter: the one whose tensor it is}
    children  [[name, node], or [first, last, node] for the names "first" to "last", ...]
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ktopt.graph import ModuleClass, Tensor

FORMAT = 2
MODULES_MAX = 2_000_000
"""More modules than this are refused: DeepSeek-V3 has 75,000 when every expert is one."""

BYTES_MAX = 64 << 20
GZIP = 31
"""zlib's wbits for the gzip container; the gzip module would cost more to import than the file to read."""


class Row(NamedTuple):
    """One module in pre-order: its name in its parent, its class, what it owns, and its parent's row (-1 for the root)."""

    name: str
    cls: ModuleClass
    tensors: tuple[Tensor, ...]
    parent: int


def encode(rows: Sequence[Row]) -> dict[str, Any]:
    """The compact form of a tree."""
    children: list[list[int]] = [[] for _ in rows]
    for index, row in enumerate(rows):
        if row.parent >= 0:
            children[row.parent].append(index)
    classes: dict[Any, int] = {}
    tensors: dict[Any, int] = {}
    nodes: dict[Any, int] = {}
    node_of = [0] * len(rows)
    for index in range(len(rows) - 1, -1, -1):
        row = rows[index]
        cls = classes.setdefault((row.cls.name, *row.cls.mro[1:]), len(classes))
        owned = tensors.setdefault(row.tensors, len(tensors))
        below = tuple(fold([(rows[child].name, node_of[child]) for child in children[index]]))
        node_of[index] = nodes.setdefault((cls, owned, below), len(nodes))
    return {
        "classes": list(classes),
        "tensors": [[[t.name, t.shape, t.dtype, t.buffer] for t in owned] for owned in tensors],
        "nodes": list(nodes),
    }


def fold(children: Sequence[tuple[str, int]]) -> list[tuple[Any, ...]]:
    """Children with runs of consecutive numbers and one node written as (first, last, node)."""
    folded: list[tuple[Any, ...]] = []
    for name, node in children:
        number = int(name) if name.isascii() and name.isdigit() and str(int(name)) == name else None
        before = folded[-1] if folded else None
        if number is not None and before and len(before) == 3 and before[1] == number - 1 and before[2] == node:
            folded[-1] = (before[0], number, node)
        elif number is not None:
            folded.append((number, number, node))
        else:
            folded.append((name, node))
    return folded


def decode(data: Mapping[str, Any]) -> list[Row]:
    """The rows of a tree in its compact form. ValueError (or KeyError, TypeError, IndexError) where the data is damaged."""
    classes = [ModuleClass(names[0], tuple(names)) for names in data["classes"]]
    tensors = [tuple(Tensor(n, tuple(shape), dtype, buffer) for n, shape, dtype, buffer in owned) for owned in data["tensors"]]
    nodes = data["nodes"]
    rows: list[Row] = []

    def add(name: str, node: int, parent: int) -> None:
        if len(rows) >= MODULES_MAX:
            raise ValueError("too many modules")
        cls, owned, children = nodes[node]
        index = len(rows)
        rows.append(Row(name, classes[cls], tensors[owned], parent))
        for child in children:
            if not 0 <= child[-1] < node:
                raise ValueError("a node stands before its child")
            if len(child) == 2:
                add(child[0], child[1], index)
            elif child[1] - child[0] >= MODULES_MAX:
                raise ValueError("too many modules")
            else:
                for number in range(child[0], child[1] + 1):
                    add(str(number), child[2], index)

    add("", len(nodes) - 1, -1)
    return rows


def pack(data: Mapping[str, Any]) -> bytes:
    """JSON in gzip, the same bytes for the same data."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    packer = zlib.compressobj(9, wbits=GZIP)
    return packer.compress(text.encode()) + packer.flush()


def unpack(packed: bytes) -> dict[str, Any]:
    """The data of a packed file. ValueError or zlib.error where it is damaged or unreasonably large."""
    unpacker = zlib.decompressobj(wbits=GZIP)
    text = unpacker.decompress(packed, BYTES_MAX)
    if not unpacker.eof:
        raise ValueError("truncated or too large")
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("not a module tree in this version's format")
    return data
