"""Whether weights are the model's own: what their file says of itself, and that each of its tensors is some parameter's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ktopt.weights import WeightError
from ktopt.weights.source import WHOLE_NUMBERS

SHOWN = 8
"""How many kinds of tensors a message lists."""


def check_contradictions(tensors: Any, config: Any) -> None:
    """WeightError where the file's own description of its model contradicts the config of the model that it is loaded into."""
    compare = getattr(tensors, "contradictions", None)
    if compare is None or not hasattr(config, "to_dict"):
        return
    found = compare(config.to_dict())
    if found:
        lines = "\n".join(f"  {each}" for each in found[:SHOWN])
        raise WeightError(f"{tensors.path}: these weights say that they are of another model:\n{lines}\nGive those of this model")


def check_unused(tensors: Any, names: Iterable[str], ignored: Iterable[str] = ()) -> None:
    """WeightError for stored tensors that no parameter takes.

    names     what the parameters are read as
    ignored   regexes of what checkpoints of this model are known to hold beside parameters
    """
    find = getattr(tensors, "unused", None)
    if find is None:
        return
    patterns = [re.compile(pattern) for pattern in ignored]
    unused = {name: file for name, file in find(names).items() if not any(p.search(name) for p in patterns)}
    if not unused:
        return
    groups: dict[tuple[str, Path], list[str]] = {}
    for name, file in unused.items():
        groups.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", name), file), []).append(name)
    lines = [_group(names, pattern, file) for (pattern, file), names in groups.items()]
    more = [f"  ... and {len(lines) - SHOWN} more kinds"] if len(lines) > SHOWN else []
    raise WeightError(
        f"{tensors.path}: these weights are of another model: no parameter of this one takes\n"
        + "\n".join([f"  {line}" for line in lines[:SHOWN]] + more)
    )


def no_numbers(tensors: Any, name: str) -> str:
    """Why what is stored for a floating-point parameter isn't its numbers, or ""."""
    stored = tensors.stored(name)
    for part, kind in zip(stored.stored, stored.types, strict=True):
        if kind in WHOLE_NUMBERS:
            return f"{stored.file}: {part} is stored as {kind}, whole numbers, of which {name} can't be made"
    unscaled = getattr(tensors, "unscaled", None)
    return unscaled(name) if unscaled is not None else ""


def _group(names: list[str], pattern: str, file: Path) -> str:
    if len(names) == 1:
        return f"{names[0]}, in {file}"
    return f"{pattern}: {len(names)} tensors, the first is {names[0]}, in {file}"
