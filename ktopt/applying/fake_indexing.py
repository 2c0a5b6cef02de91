"""Indexing and convolving fake CUDA tensors in a torch that was built without CUDA.

Python's `tensor[...]`, and a few methods more, ask for a guard of the tensor's device before they dispatch; a CPU torch has
none for CUDA, whatever FakeTensorMode says. The operations behind them need none, so this mode calls those directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
UNGUARDED = {
    torch.Tensor.contiguous: aten.contiguous,
    torch.Tensor.copy_: aten.copy_,
    torch.Tensor.nonzero: aten.nonzero,
    torch.nonzero: aten.nonzero,
    torch.Tensor.__invert__: aten.bitwise_not,
}
CONVERSIONS = {
    getattr(torch.Tensor, name): dtype
    for name, dtype in {
        "bool": torch.bool,
        "int": torch.int32,
        "long": torch.int64,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
        "float": torch.float32,
        "double": torch.float64,
    }.items()
}


class IndexWithoutGuard(TorchFunctionMode):
    """Within, indexing a tensor is spelt as select, slice, unsqueeze and index, and those methods as their operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return get_item(*args)
        if func is torch.Tensor.__setitem__:
            return set_item(*args)
        if func is torch.conv1d:
            return depthwise(*args, **(kwargs or {}))
        if func in CONVERSIONS:
            return args[0].to(CONVERSIONS[func])
        func = UNGUARDED.get(func, func)
        return func(*args, **(kwargs or {}))


def depthwise(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    """conv1d of each channel by itself, as linear attention has it: input (B, C, L), weight (C, 1, K). Fake convolutions ask for a
    device that isn't there."""
    (pad,) = padding if isinstance(padding, tuple) else (padding,)
    windows_BCLK = torch.nn.functional.pad(input, (pad, pad)).unfold(2, weight.shape[-1], 1)
    made = (windows_BCLK * weight.squeeze(1).unsqueeze(0).unsqueeze(2)).sum(-1)
    return made if bias is None else made + bias.unsqueeze(1)


def get_item(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    """tensor[key]"""
    view, indices = _view(tensor, key)
    return aten.index(view, indices) if indices else view


def set_item(tensor: torch.Tensor, key: Any, value: Any) -> None:
    """tensor[key] = value"""
    view, indices = _view(tensor, key)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if indices:
        aten.index_put_(view, indices, value)
    else:
        aten.copy_(view, value)


def _view(tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[Any]]:
    """The view that the basic parts of a key select, and an index per dimension for the rest (empty if there is none)."""
    parts = list(key) if isinstance(key, tuple) else [key]
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    skipped = tensor.dim() - sum(_consumed(part) for part in parts)
    dim = 0
    indices: list[Any] = []
    for part in parts:
        if part is Ellipsis:
            dim += skipped
            indices += [None] * skipped
        elif part is None:
            tensor = tensor.unsqueeze(dim)
            dim += 1
            indices.append(None)
        elif isinstance(part, slice):
            tensor = aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
            dim += 1
            indices.append(None)
        elif isinstance(part, int):
            tensor = aten.select(tensor, dim, part)
        else:
            index = part if isinstance(part, torch.Tensor) else torch.tensor(part, device=tensor.device)
            dim += _consumed(index)
            indices.append(index)
    return tensor, indices if any(index is not None for index in indices) else []


def _consumed(part: Any) -> int:
    """How many dimensions a part of a key takes up."""
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1
