"""KTransformersExperts on CUDA with KExpertsMarlin: every expert's matrices in 4 bits, multiplied expert by expert.

Legend: S rows, sorted by expert; E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensor

from ktopt.implementation import BuildContext
from ktopt.operators.modules.experts import KTransformersExperts
from ktopt.operators.modules.low_bit import INPUTS, OUTPUTS, Int4, pad

GROUP = 64
"""Weights that share a scale."""
NAMES = ("gate_up_proj", "down_proj")


class KExpertsMarlin(KTransformersExperts):
    """Routed experts, called as KTransformersExperts: experts(hidden_states, top_k_index, top_k_weights).

    The matrices are Int4 in groups of GROUP, quantised at load on the device where they live, one after another; products are in
    bfloat16, the rest as KTransformersExperts has it. gate_up_proj (E, 2I, H) and down_proj (E, H, I) read as fresh numbers, those
    that the products use: meant for code that looks at them, and slow.
    """

    def __init__(self, *args: Any, **tensor: Any) -> None:
        super().__init__(*args, **tensor)
        self.dtype: torch.dtype = tensor["dtype"]

    def load_tensors(self, context: BuildContext) -> None:
        tensors: Any = context.tensors
        for name in NAMES:
            weight_E = tensors.read(context.name(name), context.dtype, "cpu")  # a whole stack may be more than a card has
            held: tuple[torch.Tensor, ...] = ()
            for expert, weight in enumerate(weight_E):
                made = self._packed(weight.to(context.device))
                held = held or tuple(part.new_empty(len(weight_E), *part.shape) for part in made)
                for into, part in zip(held, made, strict=True):
                    into[expert] = part
            del self._parameters[name], weight_E
            for kind, stack in zip(("packed", "scales"), held, strict=True):
                self.register_buffer(f"{name}_{kind}", stack, persistent=False)

    @staticmethod
    def _packed(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, scales = Int4.quantize(pad(weight_NK, OUTPUTS, INPUTS), GROUP)
        return Int4.pack(q), scales

    def grouped(self, name: str, rows: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        result = rows.new_empty(len(rows), self.outputs(name), dtype=torch.bfloat16)
        if isinstance(rows, FakeTensor):  # only shapes and devices count, and how many rows an expert has is a value
            return self.product(name, 0, rows)
        start = 0
        for expert, end in enumerate(ends_E.tolist()):
            if end > start:
                result[start:end] = self.product(name, expert, rows[start:end])
                start = end
        return result

    def product(self, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        packed, scales = getattr(self, f"{name}_packed"), getattr(self, f"{name}_scales")
        return Int4.product(rows, packed[expert], scales[expert].bfloat16(), GROUP, self.outputs(name))

    def outputs(self, name: str) -> int:
        return self.hidden_dim if name == "down_proj" else 2 * self.intermediate_dim

    def __getattr__(self, name: str) -> Any:
        if name in NAMES and f"{name}_scales" in self.__dict__.get("_buffers", ()):
            columns = self.intermediate_dim if name == "down_proj" else self.hidden_dim
            device = self._buffers[f"{name}_scales"].device  # type: ignore[union-attr]
            ones = torch.eye(columns, dtype=torch.bfloat16, device=device)
            return torch.stack([self.product(name, e, ones).t() for e in range(self.num_experts)]).to(self.dtype)
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in NAMES:
            if name not in self._parameters:
                destination[f"{prefix}{name}"] = getattr(self, name)
