"""KTransformersLinear with KLinearTorch: a weight held dequantised in the plan's dtype. KLinearCPUInfer is in linear_cpu.py."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import nn
from torch.nn import functional

from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu

log = logging.getLogger(__name__)

LOW_BIT_OPS = ("KLinearMarlin", "VLinearMarlin", "KLinearQ8", "KLinearFP8")
"""Ops of linear_cuda.py."""


class KTransformersLinear(nn.Linear):
    """y = x W^T + b with W (out_features, in_features) and b (out_features) in the plan's dtype.

    An input of another dtype is computed in the weight's dtype and the result returned in the input's, so that a bfloat16 layer can
    stand in a float32 model. Where both are one dtype the result equals nn.Linear's bit for bit. Tensors are not moved between
    devices here: the plan's transfers do that.
    """

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        """A meta module of the original's size. A router is returned as it is: what it computes beyond the product is its own."""
        if context.module.role == "router":
            return original
        if not isinstance(original, nn.Linear) or type(original).forward is not nn.Linear.forward:
            raise KtoptError(
                f"{context.step.path} is a {type(original).__name__}, which computes more than a matrix product: "
                "KTransformersLinear replaces torch.nn.Linear only; take it out of the rule, or use `default`"
            )
        chosen: type[KTransformersLinear] = cls
        if context.op in LOW_BIT_OPS:
            from ktopt.operators.modules.linear_cuda import LowBitLinear

            chosen = LowBitLinear.of_op(context.op, context)
        elif context.op != "KLinearCPUInfer":
            context.require_op("KLinearTorch")
        elif cpu_kernels():
            from ktopt.operators.modules.linear_cpu import KLinearCPUInfer

            chosen = KLinearCPUInfer
        made = chosen(
            original.in_features,
            original.out_features,
            bias=original.bias is not None,
            device="meta",
            dtype=context.dtype,
        )
        return made.requires_grad_(False).train(original.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in_features) to (..., out_features), in x's dtype."""
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


@cache
def cpu_kernels(op: str = "KLinearCPUInfer", instead: str = "KLinearTorch") -> bool:
    """Whether the CPU kernels are here; where not, says once that torch computes what `op` would."""
    there, reason = cpu.available()
    if not there:
        log.warning("%s gives way to %s, whose weights take more memory: %s", op, instead, reason)
    return there
