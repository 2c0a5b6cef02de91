"""The plan's transfers at run time: forward hooks that copy tensors to the device of the module that they enter, or back.

A tensor that many layers take (the attention mask, cos and sin) is copied to each device once: copies are remembered by their
source tensor, and forgotten with it. Caches keep each layer's keys and values where the layer is, and are not moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ktopt.plan import Plan

HOST_KINDS = ("cpu", "meta")
"""Kinds of device whose memory the host reads as soon as it has the tensor."""


class Copies:
    """Copies of tensors on other devices, each made once."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies of a model, and pickle: what was copied before is copied again."""
        return Copies, ()

    def on(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on `device`: itself, a copy made before, or a new copy."""
        if tensor.device == device:
            return tensor
        if tensor.is_inference():
            return _copied(tensor, device)  # it carries no version, so a change in place couldn't be noticed
        known = self._known.setdefault(tensor, {})
        version, copy = known.get(device, (None, None))
        if version != tensor._version:
            copy = _copied(tensor, device)
            known[device] = (tensor._version, copy)
        assert copy is not None
        return copy

    def move(self, value: Any, device: torch.device) -> Any:
        """Every tensor in nested tuples, lists and dicts on `device`. Other objects, caches among them, stay as they are."""
        if isinstance(value, torch.Tensor):
            return self.on(value, device)
        if isinstance(value, tuple):
            moved = [self.move(item, device) for item in value]
            return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
        if isinstance(value, list):
            return [self.move(item, device) for item in value]
        if isinstance(value, dict):
            return type(value)(**{key: self.move(item, device) for key, item in value.items()})
        return value


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on another device. Work on an accelerator is queued behind the copy to it, so the host need not wait; a copy to
    the host is read by the host itself, which must wait until it is there."""
    return tensor.to(device, non_blocking=device.type not in HOST_KINDS)


def install_transfers(root: nn.Module, plan: Plan) -> list[Any]:
    """Install a hook for each transfer of the plan; returns their handles. One at a module that an operator has taken into itself
    is that operator's own business."""
    modules = dict(root.named_modules(remove_duplicate=False))
    copies = Copies()
    handles: list[Any] = []
    for transfer in plan.transfers:
        module = modules.get(transfer.path)
        if module is None:
            continue
        device = torch.device(transfer.target)
        if transfer.side == "input":
            handles.append(module.register_forward_pre_hook(MoveIn(copies, device), prepend=True, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(MoveOut(copies, device)))
    return handles


@dataclass(frozen=True)
class MoveIn:
    """Before a module runs: its arguments go to `device`."""

    copies: Copies
    device: torch.device

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        move, device = self.copies.move, self.device
        return move(args, device), {name: move(value, device) for name, value in kwargs.items()}


@dataclass(frozen=True)
class MoveOut:
    """After a module has run: its result goes to `device`."""

    copies: Copies
    device: torch.device

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.copies.move(output, self.device)
