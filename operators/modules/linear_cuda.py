"""KTransformersLinear on CUDA with weights of 4 or 8 bits: KLinearMarlin, VLinearMarlin, KLinearQ8 and KLinearFP8.

They compute with what torch ships (low_bit.py). A weight is quantised at load on the device where it lives, one tensor at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ktopt.implementation import BuildContext
from ktopt.operators.linear import LINEAR_OPS
from ktopt.operators.modules.linear import KTransformersLinear
from ktopt.operators.modules.low_bit import INPUTS, OUTPUTS, Float8, Int4, Int8, in_pieces, pad, refuse_older

LEAST_SM = {op.name: op.least_sm for op in LINEAR_OPS}


class LowBitLinear(KTransformersLinear):
    """y = x W^T + b with W in a few bits, in the buffers that `take` makes.

    x may have any floating dtype and the result has x's; the product is in bfloat16. `weight` reads as fresh numbers, those that
    the product uses: meant for code that looks at it, and slow.
    """

    group = 0

    @classmethod
    def of_op(cls, op: str, context: BuildContext) -> type[LowBitLinear]:
        """The class for an op under the rule's options. KtoptError where the device is too old for it."""
        refuse_older(context.device, LEAST_SM[op], op)
        if op == "KLinearFP8":
            return Float8Linear
        return Int8Linear if op == "KLinearQ8" or getattr(context.config, "num_bits", 4) == 8 else Int4Linear

    def load_tensors(self, context: BuildContext) -> None:
        """Quantise the weight, and take the bias as numbers."""
        tensors: Any = context.tensors
        for name, held in list(self._parameters.items()):
            if held is not None and name != "weight":
                read = tensors.read(context.name(name), context.dtype, context.device)
                self._parameters[name] = read if isinstance(read, nn.Parameter) else nn.Parameter(read, requires_grad=False)
        weight = tensors.read(context.name("weight"), context.dtype, context.device)
        self.dtype, self.group = context.dtype, getattr(context.config, "group_size", 64)
        del self._parameters["weight"]
        for name, made in self.take(weight).items():
            self.register_buffer(name, made, persistent=False)

    def take(self, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        """The buffers that hold a weight."""
        raise NotImplementedError

    def product(self, x_MK: torch.Tensor) -> torch.Tensor:
        """x (M, in_features) times the weight: (M, out_features) bfloat16."""
        raise NotImplementedError

    def numbers(self) -> torch.Tensor:
        """The weight that the product uses: (out_features, in_features)."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in_features) to (..., out_features), in x's dtype."""
        if not self._buffers:  # another was set
            return super().forward(x)
        x_MK = x.reshape(-1, self.in_features)
        y = self.product(x_MK) if len(x_MK) else x_MK.new_empty(0, self.out_features)
        y = y.to(x.dtype) if self.bias is None else (y + self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.__dict__.get("_buffers"):
            return self.numbers().to(self.dtype)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "_buffers" in self.__dict__:
            self._buffers.clear()  # another takes the place of the one in few bits
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._buffers:
            destination[f"{prefix}weight"] = self.weight

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {type(self).__name__.removesuffix('Linear')}"


class Int4Linear(LowBitLinear):
    """KLinearMarlin and VLinearMarlin: Int4 in groups of group_size."""

    packed: torch.Tensor
    scales: torch.Tensor

    def take(self, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        q, scales = Int4.quantize(pad(weight_NK, OUTPUTS, max(INPUTS, self.group)), self.group)
        return {"packed": Int4.pack(q), "scales": scales}

    def product(self, x_MK: torch.Tensor) -> torch.Tensor:
        return Int4.product(x_MK, self.packed, self.scales.bfloat16(), self.group, self.out_features)

    def numbers(self) -> torch.Tensor:
        return self.product(torch.eye(self.in_features, dtype=torch.bfloat16, device=self.scales.device)).t()


class Int8Linear(LowBitLinear):
    """KLinearQ8, and the Marlin ops with num_bits 8: Int8."""

    q: torch.Tensor
    scales: torch.Tensor

    def take(self, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        q, scales = in_pieces(Int8.quantize, pad(weight_NK, OUTPUTS, OUTPUTS))
        return {"q": q, "scales": scales}

    def product(self, x_MK: torch.Tensor) -> torch.Tensor:
        return Int8.product(x_MK, self.q, self.scales)[:, : self.out_features]

    def numbers(self) -> torch.Tensor:
        return Int8.numbers(self.q, self.scales)[: self.out_features, : self.in_features]


class Float8Linear(LowBitLinear):
    """KLinearFP8: Float8."""

    bits: torch.Tensor  # e4m3 as uint8, which a cast of the module leaves alone
    scales: torch.Tensor

    def take(self, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        float8, scales = in_pieces(Float8.quantize, pad(weight_NK, OUTPUTS, OUTPUTS))
        return {"bits": float8.view(torch.uint8), "scales": scales}

    def product(self, x_MK: torch.Tensor) -> torch.Tensor:
        return Float8.product(x_MK, self.bits.view(torch.float8_e4m3fn), self.scales.float())[:, : self.out_features]

    def numbers(self) -> torch.Tensor:
        whole = self.bits.view(torch.float8_e4m3fn).float() * self.scales.float()
        return whole[: self.out_features, : self.in_features]
