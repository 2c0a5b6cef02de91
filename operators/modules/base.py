"""The contract between `apply` and an operator's implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ktopt.graph import Module
from ktopt.operator import OperatorConfig
from ktopt.plan import Step
from ktopt.weights import StoredTensor


class Tensors(Protocol):
    """Weights of the model being loaded, by full parameter name. Two kinds exist: a weight file, and a model in hand."""

    def __contains__(self, name: str) -> bool: ...

    def stored(self, name: str) -> StoredTensor: ...

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor: ...


@dataclass(frozen=True)
class BuildContext:
    """What an implementation is built from.

    step        the module's row of the plan
    config      the operator's typed kwargs
    module      the module in the tree
    device      where its weights live (the generate device)
    dtype       what its floating-point weights are held in
    model_config  the transformers config of the model
    tensors     the weights, by full name; None while building on meta without weights
    """

    step: Step
    config: OperatorConfig
    module: Module
    device: torch.device
    dtype: torch.dtype
    model_config: Any
    tensors: Tensors | None = None

    def name(self, parameter: str) -> str:
        """The full name of a parameter of this module."""
        return f"{self.step.path}.{parameter}" if self.step.path else parameter


@runtime_checkable
class Loads(Protocol):
    """An operator module that loads its own tensors. One without this method has each own parameter and persistent buffer loaded by
    its name, in the context's dtype, onto the context's device."""

    def load_tensors(self, context: BuildContext) -> None: ...


class Builds(Protocol):
    """An implementation class: `build` makes the replacement on the meta device from the original module, which it may keep parts of.
    It raises KtoptError where the original is not what it can replace."""

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module: ...
