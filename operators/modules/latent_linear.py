"""kv_b_proj under latent attention on the CPU: kept as newer GGUF files have it, one tensor for keys and one for values.

Absorbed attention multiplies by just those two, so they serve as they are; in their place the model's one matrix would have to be
made of numbers, twice as large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu
from ktopt.operators.modules.linear_cpu import KLinearCPUInfer
from ktopt.weights import WeightError


class KLatentLinear(KLinearCPUInfer):
    """A kv_b_proj whose file may hold it in two. `split` then is the keys' blocks (N * L, P) and the values' (N * V, L); without
    them it is a KLinearCPUInfer like any other. Legend: N heads, L latent, P key, V value."""

    split: tuple[cpu.Blocks, cpu.Blocks] | None = None
    heads = 0

    def load_tensors(self, context: BuildContext) -> None:
        self.split = self._pieces(context)
        if self.split is None:
            super().load_tensors(context)
        else:
            del self._parameters["weight"]

    def _pieces(self, context: BuildContext) -> tuple[cpu.Blocks, cpu.Blocks] | None:
        tensors: Any = context.tensors
        name = context.name("weight")
        try:
            pieces = tensors.pieces(name) if hasattr(tensors, "pieces") else []
        except WeightError:
            return None
        if [transposed for _, _, transposed, _ in pieces] != [True, False]:
            return None
        (k_kind, (heads, latent, key), _, keys), (v_kind, (_, value, _), _, values) = pieces
        if k_kind not in cpu.KINDS or v_kind not in cpu.KINDS:
            return None
        threads = torch.get_num_threads()
        self.heads = heads
        try:
            return cpu.blocks(k_kind, heads * latent, key, keys, threads), cpu.blocks(
                v_kind, heads * value, latent, values, threads
            )
        except KtoptError as error:
            raise KtoptError(f"{name}: {error}") from None

    def numbers(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors as numbers of `dtype`: keys (N, L, P), values (N, V, L)."""
        assert self.split is not None
        made = []
        for blocks in self.split:
            held = dtype if dtype is torch.bfloat16 else torch.float32
            tensor = torch.empty(blocks.rows, blocks.columns, dtype=held)
            cpu.dequantize(blocks, tensor, torch.get_num_threads())
            made.append(tensor.to(dtype).unflatten(0, (self.heads, -1)))
        return made[0], made[1]

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.__dict__.get("split"):
            return self._whole(self.dtype)
        return super().__getattr__(name)

    def _whole(self, dtype: torch.dtype) -> torch.Tensor:
        keys_NLP, values_NVL = self.numbers(dtype)
        return torch.cat((keys_NLP.mT, values_NVL), dim=1).flatten(0, 1)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.split:
            destination[f"{prefix}weight"] = self.weight

    def extra_repr(self) -> str:
        kinds = " and ".join(dict.fromkeys(blocks.kind for blocks in self.split or ()))
        return f"{super().extra_repr()}, keys and values stored as {kinds}" if kinds else super().extra_repr()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., L) to (..., N * (P + V)), in x's dtype."""
        if not self.split:
            return super().forward(x)
        return functional.linear(x, self._whole(x.dtype))
