"""What the keys and values of a prompt hang on beside its tokens: a hash over weights, plan and settings."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path

from ktopt.config import LongContextSettings
from ktopt.diagnostics import KtoptError
from ktopt.plan import Plan

WEIGHTS = (".gguf", ".safetensors")
READ_BYTES = 1 << 24
SETTINGS = ("block_size", "kv_type", "anchor_type", "anchor_num", "dense_layer_num", "layer_step")
"""Those that decide what is kept of a block where a prompt attends to everything; where it doesn't, all do."""

KEPT = 2
"""Counted up when the bytes that are kept of a block come to mean something else: anchors in 4 bits are turned since 2."""


def model_hash(plan: Plan, weights: str | os.PathLike[str] | None, long: LongContextSettings) -> str:
    """A hash over the weights' files, every byte of them, the model's config, what computes each module, and the cache's settings.
    KtoptError where there are no files."""
    files = _files(weights)
    if not files:
        raise KtoptError(
            "`prefix_reuse` tells models apart by their weights' files, and this one has none: load it from a GGUF file or a "
            "folder, or write `prefix_reuse: false`"
        )
    whole = hashlib.blake2b(digest_size=16)
    for file in files:
        state = file.stat()
        whole.update(_digest(str(file.resolve()), state.st_size, state.st_mtime_ns))
    steps = [(step.path, step.operator, step.dtype, dict(step.kwargs), sorted(step.runs)) for step in plan.steps]
    settings = [getattr(long, name) for name in SETTINGS] if long.prefill == "exact" else [repr(long)]
    whole.update(json.dumps([KEPT, plan.model.config_digest, steps, settings], default=str).encode())
    return whole.hexdigest()


def _files(weights: str | os.PathLike[str] | None) -> list[Path]:
    if weights is None or not Path(weights).exists():
        return []
    path = Path(weights)
    if path.name == "config.json":
        path = path.parent
    return sorted(each for each in path.iterdir() if each.suffix in WEIGHTS) if path.is_dir() else [path]


@lru_cache(maxsize=64)
def _digest(path: str, size: int, changed_ns: int) -> bytes:
    """Of a file's bytes; it is read once for as long as its size and time are these."""
    made = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            made.update(data)
    return made.digest()
