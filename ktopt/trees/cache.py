"""The user's cache of built module trees: $XDG_CACHE_HOME/ktopt/trees, by default ~/.cache/ktopt/trees.

A file is named by what its tree depends on: the config, transformers' version and the file format. What can't be read is built
anew, what can't be written is left: the cache never makes a command fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktopt.models import treefile
from ktopt.models.treefile import FORMAT, Row

Tree = tuple[Sequence[Row], Mapping[str, str]]
"""A tree's rows, and which parameters are another's tensor."""


def folder() -> Path | None:
    """Where trees are kept, or None where the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "ktopt" / "trees"


def key_of(config: Mapping[str, Any], version: str) -> str:
    """The name that a config's tree is kept under."""
    text = json.dumps([FORMAT, version, config], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load(key: str) -> Tree | None:
    """The tree kept under a key, or None where there is none or it is damaged."""
    place = folder()
    if place is None:
        return None
    try:
        data = treefile.unpack((place / f"{key}.json.gz").read_bytes())
        return (treefile.decode(data), dict(data["tied"])) if data["key"] == key else None
    except Exception:  # whatever is wrong with it, it can be built again
        return None


def store(key: str, tree: Tree) -> None:
    """Keeps a tree. Another process sees all of it or nothing."""
    place = folder()
    if place is None:
        return
    import tempfile

    packed = treefile.pack({"format": FORMAT, "key": key, "tied": tree[1], **treefile.encode(tree[0])})
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(packed)
            os.replace(name, place / f"{key}.json.gz")
        except OSError:
            os.unlink(name)
            raise
