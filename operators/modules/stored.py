"""Weights that stay in the blocks of their file: how a module holds one, and how it reads to the rest of torch.

`HoldsBlocks` is what KLinearCPUInfer and KEmbeddingCPU share. To code that asks for `module.weight` it shows a StoredWeight, which
has a shape and a dtype and takes no memory; its numbers come to be where an operation uses them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu
from ktopt.weights import WeightError
from ktopt.weights.packed import joint_axis

log = logging.getLogger(__name__)

Parts = tuple[tuple[int, cpu.Blocks], ...]
"""A weight (rows, columns) in parts from top to bottom: the first row and the blocks of each."""

_taken: WeakValueDictionary[tuple[int, ...], cpu.Blocks] = WeakValueDictionary()
"""Blocks in use, by their place in memory: modules that share a stored tensor share its Blocks, so that it is looked through once
and pickled once."""


def raw_parts(context: BuildContext, parameter: str, what: str) -> list[Any]:
    """The stored parts of a module's parameter, (storage type, shape, bytes) each, where the kernels have all of their types; else
    none, which the log says of `what`."""
    raw, name = getattr(context.tensors, "raw", None), context.name(parameter)
    try:
        parts = raw(name) if raw is not None else []
    except WeightError:  # transposed, shifted, scaled by a tensor beside it, or in memory: to be read as numbers
        return []
    without = sorted({kind for kind, _, _ in parts} - set(cpu.KINDS))
    if not without:
        return list(parts)
    kinds, dtype = ", ".join(without), context.step.dtype
    log.warning("%s: there is no CPU kernel for %s, so %s dequantised to %s", name, kinds, what, dtype)
    return []


def stored_parts(context: BuildContext) -> Iterator[tuple[int, cpu.Blocks]]:
    """The stored parts of a module's weight that the kernels can take: (first row, blocks); none where one of them can't be taken.

    Says so in the log where there is no kernel for a type. KtoptError for a tensor with scales that are no numbers.
    """
    parts, name = raw_parts(context, "weight", "it is"), context.name("weight")
    wanted = next(tensor.shape for tensor in context.module.tensors if tensor.name == "weight")
    if joint_axis(wanted, [shape for _, shape, _ in parts]) != 0 or any(len(shape) != 2 for _, shape, _ in parts):
        return
    first = 0
    for kind, shape, data in parts:
        rows, columns = shape
        place = (data.ctypes.data, data.nbytes, cpu.KINDS.index(kind), rows, columns)
        made = _taken.get(place)
        if made is None:
            try:
                made = _taken[place] = cpu.blocks(kind, rows, columns, data, torch.get_num_threads())
            except KtoptError as error:
                raise KtoptError(f"{name} ({kind}): {error}") from None
        yield first, made
        first += rows


def as_numbers(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """A stored weight dequantised: (rows, columns) in `dtype`, a fresh tensor."""
    held = dtype if dtype is torch.bfloat16 else torch.float32
    whole = torch.empty(sum(part.rows for _, part in parts), parts[0][1].columns, dtype=held)
    for first, part in parts:
        cpu.dequantize(part, whole[first : first + part.rows], torch.get_num_threads())
    return whole.to(dtype)


class StoredWeight(torch.Tensor):
    """A stored weight (rows, columns) as torch sees it: a parameter of `dtype` on the CPU, without memory.

    An operation on it gets a dequantised copy, which goes when the operation is done. It can't be changed in place, and `data`
    can't be set: assign the module a new `weight` instead.
    """

    parts: Parts

    @staticmethod
    def __new__(cls, parts: Parts, dtype: torch.dtype) -> StoredWeight:
        shape = (sum(part.rows for _, part in parts), parts[0][1].columns)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")  # type: ignore[attr-defined]
        made.parts, made._is_param = parts, True  # an nn.Parameter, as isinstance has it
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].parts, args[0].dtype)
        for given, argument in zip(args, func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, cls):
                raise KtoptError(f"{func}: {IN_BLOCKS}")
        args, kwargs = pytree.tree_map_only(cls, StoredWeight.as_numbers, (args, kwargs or {}))
        return func(*args, **kwargs)

    def as_numbers(self) -> torch.Tensor:
        return as_numbers(self.parts, self.dtype)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise KtoptError(f"weight.data = ...: {IN_BLOCKS}")

    def numpy(self, **options: Any) -> Any:
        return self.as_numbers().numpy(**options)

    def __deepcopy__(self, memo: Any) -> StoredWeight:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return StoredWeight, (self.parts, self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        kinds = ", ".join(dict.fromkeys(part.kind for _, part in self.parts))
        return f"StoredWeight({list(self.shape)}, dtype={self.dtype}, stored as {kinds})"


IN_BLOCKS = (
    "this weight lies in the blocks of a file, which aren't changed: give the module another, `module.weight = nn.Parameter(...)`"
)


class HoldsBlocks(nn.Module):
    """A module whose `weight` may be in blocks: `parts`, which are empty where it is an ordinary parameter.

    `weight` may be set to a parameter, or to another module's StoredWeight, which ties them. A state dict has the numbers, of one
    tensor for weights that are tied. Where the module is moved off the CPU, its weight becomes numbers there; a change of dtype is
    what `weight` and results are in from then on, and leaves the blocks as they are.
    """

    parts: Parts
    dtype: torch.dtype

    def load_weight(self, context: BuildContext) -> None:
        """Take the weight as it is stored, or else, where there is no kernel for it, as numbers."""
        tensors: Any = context.tensors
        self.parts = tuple(stored_parts(context))
        if self.parts:
            self._parameters.pop("weight", None)
        else:
            self.weight = parameter(tensors.read(context.name("weight"), context.dtype, context.device))

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and (parts := self.__dict__.get("parts")):
            return StoredWeight(parts, self.dtype)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif isinstance(value, StoredWeight):
            self._parameters.pop("weight", None)
            self.parts, self.dtype = value.parts, value.dtype
        else:
            self.__dict__["parts"] = ()
            super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.parts:
            destination[f"{prefix}weight"] = shared_numbers(self.parts, self.dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        if self.parts and given is not None:
            self.weight = parameter(torch.empty(self.weight.shape, dtype=self.dtype))
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.parts:
            probe = fn(torch.empty(0, dtype=self.dtype))
            if probe.device.type == "cpu":
                self.dtype = probe.dtype
            else:
                self.weight = parameter(self.weight.as_numbers())
        return super()._apply(fn, recurse)

    def stored_as(self) -> str:
        """What `repr` says of the blocks."""
        kinds = ", ".join(dict.fromkeys(part.kind for _, part in self.parts))
        return f", stored as {kinds}" if kinds else ""


_numbers: WeakKeyDictionary[cpu.Blocks, tuple[ref[torch.Tensor], int]] = WeakKeyDictionary()
"""Weights that a state dict has as numbers, while it lives, with their version then."""


def shared_numbers(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """as_numbers, but the tensor that another module with the same blocks was given, if that is still in use and unchanged."""
    known, version = _numbers.get(parts[0][1], (lambda: None, 0)) if len(parts) == 1 else (lambda: None, 0)
    held = known()
    if held is not None and held.dtype is dtype and held._version == version:
        return held
    with torch.inference_mode(False):  # whose tensors have no version
        made = as_numbers(parts, dtype)
    if len(parts) == 1:
        _numbers[parts[0][1]] = ref(made), made._version
    return made


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    """A tensor as a parameter that asks for no gradient; one that is a parameter already, a tied one, stays itself."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
