"""Weights that stay as their file stores them, because the op that runs computes on them so: their types and bytes.

A module's matrices (parameters of two dimensions or more) may stay; its biases and buffers are held as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ktopt.graph import ITEM_BYTES, Module, ModuleGraph, Tensor
from ktopt.operator import OperatorConfig, OperatorSpec
from ktopt.plan import Step
from ktopt.weights.ggml_types import BY_NAME
from ktopt.weights.source import StoredTensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays of a module.

    types      storage types of the matrices that stay, in order
    less       bytes by which the file's are fewer than those of the same matrices held as numbers
    lacking    storage types of matrices that can't stay, for want of a kernel
    """

    types: tuple[str, ...] = ()
    less: int = 0
    lacking: tuple[str, ...] = ()


def kept_types(spec: OperatorSpec, config: OperatorConfig, runs: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    """The storage types that an operator keeps under this config; `runs` as in a plan's row."""
    asked = getattr(config, "generate_op", "")
    op = spec.ops.get(runs.get(asked, (asked, ""))[0])
    return op.keeps if op is not None else ()


def is_matrix(tensor: Tensor) -> bool:
    return not tensor.buffer and len(tensor.shape) > 1 and "float" in tensor.dtype


def kept(module: Module, keeps: tuple[str, ...], stored: Mapping[str, StoredTensor], dtype: str) -> Kept:
    """What stays of a module whose op keeps these types, and which would else be held in `dtype`."""
    types: list[str] = []
    lacking: list[str] = []
    less = 0
    for tensor in filter(is_matrix, module.tensors):
        found = stored.get(f"{module.path}.{tensor.name}")
        if found is None or not found.in_place or tuple(found.shape) != tensor.shape:
            continue
        without = [kind for kind in found.types if kind not in keeps]
        if without:
            lacking += without
        else:
            types += found.types
            less += tensor.numel * ITEM_BYTES[dtype] - found.nbytes
    return Kept(tuple(dict.fromkeys(types)), less, tuple(dict.fromkeys(lacking)))


def tied(steps: tuple[Step, ...], graph: ModuleGraph, stored: Mapping[str, StoredTensor]) -> tuple[Step, ...]:
    """The rows of a plan in which a parameter that is another's tensor (a tied lm_head the embedding's) costs nothing, where both
    are on one device and in one form."""
    if not graph.tied:
        return steps
    made = list(steps)
    for name, first in graph.tied.items():
        (path, _, leaf), (owner, _, _) = name.rpartition("."), first.rpartition(".")
        module = graph.by_path[path]
        step, other = made[module.index], made[graph.by_path[owner].index]
        if (step.generate_device, step.stored) != (other.generate_device, other.stored):
            continue
        tensor = next(t for t in module.tensors if t.name == leaf)
        shared = tensor.numel * ITEM_BYTES[step.dtype if "float" in tensor.dtype else tensor.dtype]
        if step.stored:
            shared = stored[name].nbytes
        if step.weight_bytes < shared:
            continue  # its op holds a copy in fewer bits
        notes = (*step.notes, f"shares its {leaf} with {owner}")
        made[module.index] = step._replace(weight_bytes=max(0, step.weight_bytes - shared), notes=notes)
    return tuple(made)


def possible_bytes(module: Module, types: Iterable[str], dtype: str) -> tuple[int, int]:
    """The least and the most that a module's matrices may take, stored in these types: of several matrices or types, a plan doesn't
    say which is stored how, nor whether one is held in `dtype`."""
    least = most = 0
    matrices = [tensor for tensor in module.tensors if is_matrix(tensor)]
    for tensor in matrices:
        sizes = [size for kind in types if (size := _size(tensor, kind)) is not None]
        if not sizes or len(matrices) > 1:
            sizes.append(tensor.numel * ITEM_BYTES[dtype])
        least += min(sizes)
        most += max(sizes)
    return least, most


def _size(tensor: Tensor, kind: str) -> int | None:
    """Bytes of a matrix stored so; None where its rows aren't whole blocks."""
    layout = BY_NAME.get(kind)
    if layout is None or tensor.shape[-1] % layout.block_elements:
        return None
    return tensor.numel // tensor.shape[-1] * layout.row_bytes(tensor.shape[-1])
