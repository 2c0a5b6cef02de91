"""KTransformersLinear with KLinearCPUInfer: a weight used as its file stores it, by the CPU kernels.

The kernels read the stored blocks. Where they have no way of their own for many tokens (floating-point types, and CPUs without
AVX512 VNNI), from FEW_TOKENS on a tile of rows at a time is dequantised and torch multiplies. A storage type without a kernel is
dequantised at load, and computed as KLinearTorch does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from threading import local
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.nn import functional

from ktopt.implementation import BuildContext
from ktopt.kernels import cpu
from ktopt.operators.modules.linear import KTransformersLinear
from ktopt.operators.modules.stored import HoldsBlocks, Parts, parameter

FEW_TOKENS = 20
"""Up to so many tokens a kernel that goes token by token is faster than dequantising a tile and torch's product (measured on 2
cores, 576 to 2048 inputs)."""
TILE_BYTES = 4 << 20
"""What a tile takes: it should stay in the cache between being written and being read."""


@cache
def multiplies_bfloat16() -> bool:
    """Whether torch's products are faster in bfloat16 than in float32 here."""
    return bool(torch.cpu._is_avx512_bf16_supported())


class KLinearCPUInfer(HoldsBlocks, KTransformersLinear):
    """y = x W^T + b. The weight is in the blocks of a file, mapped, or a parameter of a floating-point dtype.

    x may have any floating dtype; the result has x's. Sums are in float32. The kernels round activations to 8 bits (see
    kernels/cpu); where torch multiplies, both sides are rounded to bfloat16 if the CPU multiplies that, and a weight without blocks
    in float32 is multiplied in float32. Where x or a parameter asks for a gradient, torch computes, and it gets it.
    """

    def __init__(self, *args: Any, **tensor: Any) -> None:
        super().__init__(*args, **tensor)
        self.dtype: torch.dtype = tensor["dtype"]
        self._seen: cpu.Blocks | None = None
        self._product = cpu.product()

    def load_tensors(self, context: BuildContext) -> None:
        """Take the weight as HoldsBlocks does, and the bias as numbers."""
        tensors: Any = context.tensors
        if self.bias is not None:
            self._parameters["bias"] = parameter(tensors.read(context.name("bias"), context.dtype, context.device))
        self.load_weight(context)

    def extra_repr(self) -> str:
        return str(super().extra_repr()) + self.stored_as()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in_features) to (..., out_features), in x's dtype."""
        tokens = x.numel() // self.in_features
        parts = self.parts or self._weight_as_parts()
        if not parts or tokens == 0 or not x.is_cpu or (torch.is_grad_enabled() and self._asks_gradient(x)):
            return self._by_torch(x)
        if tokens > FEW_TOKENS and not all(cpu.takes_many(part) for _, part in parts):
            return self._by_torch(x)
        x_TC = x if x.dtype is torch.float32 or x.dtype is torch.bfloat16 else x.float()
        x_TC = x_TC.contiguous()
        out_TR = torch.empty((*x.shape[:-1], self.out_features), dtype=torch.float32)
        threads, into = torch.get_num_threads(), out_TR.data_ptr()
        for first, part in parts:
            self._product(
                *part.call,
                x_TC.data_ptr(),
                x_TC.dtype is torch.bfloat16,
                tokens,
                into + first * out_TR.itemsize,
                self.out_features,
                threads,
            )
        if self.bias is not None:
            out_TR += self.bias
        return out_TR if x.dtype is torch.float32 else out_TR.to(x.dtype)

    def _asks_gradient(self, x: torch.Tensor) -> bool:
        return x.requires_grad or any(p is not None and p.requires_grad for p in self._parameters.values())

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        """The product by torch, in the dtype that suits: a tile of rows after another where the weight is in blocks."""
        if not self.parts:
            return super().forward(x)
        dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
        operand = x.to(dtype)
        tiles = self._tiles(dtype, fresh=x.requires_grad)  # which autograd keeps
        made = [functional.linear(operand, tile) for tile in tiles]
        whole = (made[0] if len(made) == 1 else torch.cat(made, dim=-1)).to(x.dtype)
        return whole if self.bias is None else whole + self.bias.to(x.dtype)

    def _tiles(self, dtype: torch.dtype, fresh: bool = True) -> Iterator[torch.Tensor]:
        """The weight's rows as numbers, in pieces from top to bottom; unless `fresh`, each in the same memory."""
        step = max(1, TILE_BYTES // (self.in_features * dtype.itemsize))
        held = dtype if dtype is torch.bfloat16 else torch.float32
        threads = torch.get_num_threads()
        for _, part in self.parts:
            for start in range(0, part.rows, step):
                rows = min(step, part.rows - start)
                memory = torch.empty(rows * self.in_features, dtype=held) if fresh else scratch(rows * self.in_features, held)
                tile = memory.view(rows, self.in_features)
                cpu.dequantize(part, tile, threads, start)
                yield tile.to(dtype)

    def _weight_as_parts(self) -> Parts:
        """The weight parameter where it is now, as one part; none where the kernels can't take it."""
        weight = self.weight
        if not weight.is_cpu or isinstance(weight, FakeTensor) or not weight.is_contiguous():
            return ()
        if self._seen is None or self._seen.owner is not weight or self._seen.call[1] != weight.data_ptr():
            self._seen = cpu.tensor_blocks(weight)
        return ((0, self._seen),) if self._seen else ()


_memory = local()


def scratch(numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that this thread uses again and again: large new tensors cost a page fault for every 4 KiB."""
    held: torch.Tensor | None = getattr(_memory, str(dtype), None)
    if held is None or held.numel() < numbers:
        held = torch.empty(numbers, dtype=dtype)
        setattr(_memory, str(dtype), held)
    return held[:numbers]
