"""Children of a decoder layer as the CPU kernels take them, and whether they are still what they were: for KDecoderLayer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ktopt.kernels import cpu
from ktopt.operators.modules.linear import KTransformersLinear


class CannotFuse(Exception):
    """Why a layer can't be run as one."""


@dataclass(eq=False)
class Watched:
    """What a fused layer was made of.

    children   of modules, parameters and attributes that matter: where each is held, by what name, and which it was
    tensors    those whose memory the kernels read, and where that was; `kept` keeps it there
    versions   those of which a copy was made, and their count of changes then
    hooks      of all children
    """

    children: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    hooks: list[Mapping[int, Any]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def add(self, parent: nn.Module) -> None:
        """Watch a module's children and parameters, and the children's hooks."""
        for held in (parent._modules, parent._parameters):
            self.children += [(held, name, child) for name, child in held.items()]
        for child in parent._modules.values():
            if child is None:
                continue
            if "forward" in vars(child) or not _known_forward(type(child)):
                raise CannotFuse(f"a {type(child).__name__} has a forward of its own")
            self.children.append((vars(child), "forward", None))
            self.hooks += [child._forward_hooks, child._forward_pre_hooks]

    def attributes(self, module: nn.Module, *names: str) -> None:
        """Watch numbers that a module keeps as plain attributes, those of these names that it has."""
        held = vars(module)
        self.children += [(held, name, held[name]) for name in names if name in held]

    def copied(self, tensor: torch.Tensor) -> None:
        """Note that a copy of this tensor is read in its place. Changes that torch doesn't count (through `.data`) aren't seen."""
        if not tensor.is_inference():
            self.versions.append((tensor, tensor._version))

    def tensor(self, held: Mapping[str, Any], name: str) -> torch.Tensor:
        """Watch a tensor that the kernels are to read; answers another view of its memory, which stays as long as this."""
        found: torch.Tensor = held[name]
        self.children.append((held, name, found))
        view = found.detach()
        if not found.is_meta:
            self.tensors.append((found, found.data_ptr()))
            self.kept.append(view)
        return view

    def asks_gradient(self) -> bool:
        return any(tensor.requires_grad for tensor, _ in self.tensors)

    def stands(self) -> bool:
        """Whether all is as it was, and nothing is hooked."""
        for held, name, child in self.children:
            if held.get(name) is not child:
                return False
        for tensor, at in self.tensors:
            if tensor.data_ptr() != at:
                return False
        for tensor, version in self.versions:
            if tensor._version != version:
                return False
        return not any(self.hooks) or not self.calls_back()

    def calls_back(self) -> bool:
        """Whether a child has a hook that matters now: transformers' own only do while outputs of attention are asked for."""
        for hooks in self.hooks:
            if any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks.values()):
                return True
        from transformers.utils.output_capturing import _active_collector

        asked = _active_collector.get()
        return bool(asked) and any(key != "hidden_states" and not key.startswith("_") for key in asked)


def only(module: nn.Module, known: set[str]) -> None:
    others = [f"{name} ({type(child).__name__})" for name, child in module._modules.items() if name not in known]
    if others:
        raise CannotFuse(f"{type(module).__name__} holds {', '.join(others)}")


def _known_forward(cls: type) -> bool:
    """Whether a class's forward is transformers', torch's or ktopt's own."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    return owner.__module__.partition(".")[0] in ("transformers", "torch", "ktopt")


def norm_of(norm: Any, count: int, watched: Watched) -> tuple[int, float]:
    """The address of the weight of a norm of `count` numbers as float32, and its epsilon."""
    name = type(norm).__name__
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not name.endswith("RMSNorm") or eps is None or set(norm._parameters) != {"weight"}:
        raise CannotFuse(f"the kernels have no {name}")
    on_cpu(norm.weight, name)
    watched.attributes(norm, "variance_epsilon", "eps")
    if "Gemma" not in name:
        return floats(norm._parameters, "weight", count, watched), float(eps)
    _has(norm.weight, count)
    view = watched.tensor(norm._parameters, "weight")
    if view.is_meta:
        return 0, float(eps)
    weight = view.float() + 1.0  # which is what Gemma multiplies by
    watched.copied(norm.weight)
    watched.kept.append(weight)
    return weight.data_ptr(), float(eps)


def bundle(watched: Watched, *linears: Any) -> list[tuple[int, ...]]:
    """The matrices of linears that multiply the same input, one below the other, as _cpu.layer takes them; none on meta."""
    made: list[tuple[int, ...]] = []
    at = 0
    for linear in linears:
        if not isinstance(linear, nn.Linear):
            raise CannotFuse(f"{type(linear).__name__} is no linear layer that the kernels know")
        parts = parts_of(linear, watched)
        bias = floats(linear._parameters, "bias", linear.out_features, watched) if linear.bias is not None else 0
        for first, part in parts:
            made.append((*part.call, at + first, bias + 4 * first if bias else 0))
            watched.kept.append(part)
        at += linear.out_features
    return made


def parts_of(linear: Any, watched: Watched) -> list[tuple[int, cpu.Blocks]]:
    """A linear's weight as it is held: (first row, blocks) from top to bottom; none on meta."""
    stored = linear.__dict__.get("parts")
    if stored:
        watched.children.append((vars(linear), "parts", stored))
        return list(stored)
    if type(linear).forward is not nn.Linear.forward and not isinstance(linear, KTransformersLinear):
        raise CannotFuse(f"{type(linear).__name__} computes in its own way")
    if linear._parameters.get("weight") is None:
        raise CannotFuse(f"{type(linear).__name__} has no weight of its own")
    return matrix(linear, "weight", watched)


def matrix(module: Any, name: str, watched: Watched) -> list[tuple[int, cpu.Blocks]]:
    """A module's parameter, flattened to a matrix, as one part; none on meta."""
    view = watched.tensor(module._parameters, name)
    on_cpu(view, type(module).__name__)
    if view.is_meta:
        return []
    blocks = cpu.tensor_blocks(view.flatten(0, -2)) if view.is_contiguous() else None
    if blocks is None:
        raise CannotFuse(f"the kernels can't take a weight of {view.dtype}")
    return [(0, blocks)]


def _has(tensor: torch.Tensor, count: int) -> None:
    if tensor.shape != (count,):
        raise CannotFuse(f"a vector of {count} numbers has the shape {list(tensor.shape)}")


def floats(held: Mapping[str, Any], name: str, count: int, watched: Watched) -> int:
    """The address of a module's vector of `count` numbers as float32, a copy where it is something else; 0 on meta."""
    view = watched.tensor(held, name)
    _has(view, count)
    if view.is_meta:
        return 0
    wide = view.float().contiguous()
    if wide.data_ptr() != view.data_ptr():
        watched.copied(held[name])
    watched.kept.append(wide)
    return int(wide.data_ptr())


def on_cpu(tensor: torch.Tensor, name: str) -> None:
    if tensor.device.type not in ("cpu", "meta"):
        raise CannotFuse(f"{name} is on {tensor.device}")
