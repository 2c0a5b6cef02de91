"""Non-persistent buffers (rotary frequencies, embedding scales) are in no weight file: the model's class computes them.

A model built on the meta device has none of their values. transformers v5 asks of every class that its `_init_weights` can set
them, since its own loading relies on that; so does this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ktopt.diagnostics import KtoptError
from ktopt.implementation import Loads
from ktopt.plan import Plan


def initialise_buffers(root: nn.Module, plan: Plan) -> None:
    """Give every non-persistent buffer that is on meta its value. Runs before parameters are loaded: `_init_weights` writes those
    too, which on meta does nothing. Operators that load their own tensors see to their own buffers."""
    for path, module, owner in _with_owners(root, "", None):
        names = [n for n, b in module._buffers.items() if b is not None and b.is_meta and n in module._non_persistent_buffers_set]
        if names and not isinstance(module, Loads):
            _initialise(module, names, owner, path)
            for name in names:
                buffer = module._buffers[name]
                assert buffer is not None
                module._buffers[name] = buffer.to(_device(plan, path))


def _with_owners(module: nn.Module, path: str, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every module with its path and the nearest pretrained model that it belongs to, whose `_init_weights` knows it."""
    if hasattr(module, "_init_weights"):
        owner = module
    yield path, module, owner
    for name, child in module.named_children():
        yield from _with_owners(child, f"{path}.{name}" if path else name, owner)


def _initialise(module: nn.Module, names: list[str], owner: Any, path: str) -> None:
    for name in names:
        buffer = module._buffers[name]
        assert buffer is not None
        module._buffers[name] = _unset(torch.empty_like(buffer, device="cpu"))
    if owner is not None:
        owner._init_weights(module)
    for name in names:
        value = module._buffers[name]
        if value is None or _is_unset(value):
            kind = type(module).__name__
            raise KtoptError(f"{path}.{name}: {kind} has a buffer that is in no weight file and that its model doesn't initialise")


def _unset(buffer: torch.Tensor) -> torch.Tensor:
    """Fill with a value that no computed buffer has, so that one left alone is noticed."""
    return buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer


def _is_unset(buffer: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    if not buffer.is_floating_point() or isinstance(buffer, FakeTensor):
        return False
    return bool(buffer.isnan().any())


def _device(plan: Plan, path: str) -> torch.device:
    """Where the nearest module that the plan knows is placed."""
    while path not in plan.by_path:
        path = path.rpartition(".")[0]
    return torch.device(plan.by_path[path].generate_device)
