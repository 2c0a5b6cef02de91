"""A device that is none: its tensors lie in main memory, under the name "meta", and operations refuse what they would on a GPU.

Within `PretendDevice`, tensors made on or moved to DEVICE have numbers. An operation with tensors of both devices is an error, but
for copies, scalars, and indices, which a GPU's tensor may have on the CPU. Such a tensor has no `numpy`, and no address.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten
DEVICE = torch.device("meta")
MEET = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class There(torch.Tensor):
    """A tensor on the pretended device; `here` has its numbers."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> There:
        made = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype, device=DEVICE
        )
        made.here = here
        return made

    def tolist(self) -> Any:
        return self.here.tolist()

    def __repr__(self) -> str:
        return f"There({self.here!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of PretendDevice")


class PretendDevice(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        _check(func, args, kwargs)
        there = any(isinstance(each, There) for each in tree_flatten((args, kwargs))[0])
        if kwargs.get("device") is not None:
            there, kwargs["device"] = kwargs["device"] == DEVICE, torch.device("cpu")
        own_args, own_kwargs = tree_map_only(There, lambda each: each.here, (args, kwargs))
        made = func(*own_args, **own_kwargs)
        if func._schema.is_mutable and made is own_args[0]:
            return args[0]
        return tree_map_only(torch.Tensor, There, made) if there else made


def _check(func: Any, args: Any, kwargs: Any) -> None:
    given = [args[0], *args[2:]] if func in INDEXED else tree_flatten((args, kwargs))[0]
    wide = [each for each in given if isinstance(each, torch.Tensor) and each.dim()]
    if func not in MEET and len({isinstance(each, There) for each in wide}) > 1:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found meta and cpu")
