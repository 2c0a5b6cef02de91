"""The contract between `apply` and an operator's implementation: what one is built from, and how it gets its weights.

operator.py says what an operator declares; this says what its implementation, an nn.Module under operators/modules/ or in another
package, answers to. Both sides import it, and it imports no torch itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ktopt.diagnostics import KtoptError
from ktopt.graph import Module
from ktopt.operator import OperatorConfig
from ktopt.plan import Step
from ktopt.weights import StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import nn


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

    @property
    def op(self) -> str:
        """The inner op that runs: the rule's generate_op, or the op that the plan put in its place."""
        asked: str = getattr(self.config, "generate_op", "")
        return self.step.runs.get(asked, (asked, ""))[0]

    def require_op(self, op: str) -> None:
        """KtoptError unless `op` is the one that runs."""
        if self.op != op:
            raise KtoptError(f"{self.step.path}: the plan asks for {self.op}, which this version can't run; it can run {op}")


@runtime_checkable
class Loads(Protocol):
    """An operator module that loads its own tensors. One without this method has each own parameter and persistent buffer loaded by
    its name, onto the context's device, in the dtype that it has on meta: the context's dtype, or another that its class insists
    on (a router whose weight transformers keeps in float32). Submodules that `build` kept load as they would without operator."""

    def load_tensors(self, context: BuildContext) -> None:
        """Fill every parameter and buffer of the module, non-persistent ones too. `context.tensors` is not None here."""
        ...


class Builds(Protocol):
    """An implementation class."""

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        """The replacement, made on the meta device. It may keep parts of the original, or be the original where nothing changes. It
        has the original's parameter names and answers the same calls. Raises KtoptError where it can't replace the original, which
        is left as it was."""
        ...
