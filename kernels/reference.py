"""What kernels must compute, in the plainest way: the oracle of their tests, on gguf's own dequantiser and float64. Slow.

Legend: T tokens, R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import torch


def weight(kind: str, raw: numpy.ndarray[Any, Any], columns: int) -> torch.Tensor:
    """Stored bytes of a type that gguf knows, as float32 (R, C)."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, quants

    numbers = quants.dequantize(raw, GGMLQuantizationType[kind])
    return torch.from_numpy(np.array(numbers, dtype=np.float32)).reshape(-1, columns)


def linear(x_TC: torch.Tensor, weight_RC: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float64: (T, R)."""
    return x_TC.double() @ weight_RC.double().T


def linear_error(x_TC: torch.Tensor, weight_RC: torch.Tensor, rounded: bool) -> torch.Tensor:
    """How far a kernel's result may be off, float64 (T, R).

    Float32 sums may lose some millionths of the sum of magnitudes. Where activations are `rounded` to 8 bits, with a scale for each
    32 of them, each is off by half a step at most, a step being the largest of the 32 over 127; a product by that times its weight.
    """
    magnitudes = x_TC.double().abs() @ weight_RC.double().abs().T
    sums = magnitudes * 2e-6 + 1e-30
    if not rounded:
        return sums
    half_steps = x_TC.double().abs().unflatten(-1, (-1, 32)).amax(-1) / 254
    return half_steps @ weight_RC.double().abs().unflatten(-1, (-1, 32)).sum(-1).T * 1.001 + sums
