"""What kernels must compute, in the plainest way: the oracle of their tests, on gguf's own dequantiser and float64. Slow.

Legend: T tokens, R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def attention(
    q_THD: torch.Tensor, keys_GND: torch.Tensor, values_GNV: torch.Tensor, start: int, window: int, scale: float
) -> torch.Tensor:
    """Causal attention in float64 by torch's own (T, H, V): the queries are those of the last T of N keys. One that stands before
    `start`, and so sees no key, gives zeros."""
    import torch

    queries, keys, values = q_THD.double().transpose(0, 1), keys_GND.double(), values_GNV.double()
    shown = seen(q_THD.shape[0], keys.shape[1], start, window)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], shown, scale=scale, enable_gqa=True
    )
    return torch.where(shown.any(1)[:, None, None], out[0].transpose(0, 1), 0.0)


def seen(tokens: int, keys: int, start: int, window: int) -> torch.Tensor:
    """Which of N keys the last T queries see, bool (T, N)."""
    import torch

    position, key = torch.arange(keys - tokens, keys)[:, None], torch.arange(keys)
    shown = (key <= position) & (key >= start)
    return shown & (key > position - window) if window else shown


def attention_error(
    q_THD: torch.Tensor, keys_GND: torch.Tensor, values_GNV: torch.Tensor, start: int, window: int, scale: float, rounding: float
) -> torch.Tensor:
    """How far a kernel's attention may be off, float64 (T, H, V). `rounding` is the most that a number changes, relatively, when it
    is rounded: 2^-9 for bfloat16.

    A score is off by 2 * rounding (of query and key) times the sum of its products' magnitudes at most, and so is the mean of the
    scores by weight, which the softmax's sum moves by; a weight by the exponential of both, and by its own rounding, and a value by
    its. Float32 sums add some millionths.
    """
    import torch

    heads = q_THD.shape[1]
    queries = q_THD.double().transpose(0, 1)
    keys, values = (x.double().repeat_interleave(heads // x.shape[0], 0) for x in (keys_GND, values_GNV))
    hidden = ~seen(q_THD.shape[0], keys.shape[1], start, window)
    scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    weights = torch.nan_to_num(scores.softmax(-1))
    off = (2 * rounding + 2e-6) * scale * (queries.abs() @ keys.abs().transpose(1, 2))
    off = torch.expm1(off + (weights * off).sum(-1, keepdim=True)) + 2 * rounding + 4e-6
    return ((weights * off) @ values.abs()).transpose(0, 1) + 1e-30


@dataclass(frozen=True)
class Expert:
    """One gated expert: gate and up (inner, hidden), down (hidden, inner), float32; whether the kernels round what each meets."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    rounded: tuple[bool, bool, bool]


def experts(
    x_TC: torch.Tensor,
    index_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    every: Sequence[Expert],
    activation: Callable[[torch.Tensor], torch.Tensor],
    steepest: float = 1.13,
) -> tuple[torch.Tensor, torch.Tensor]:
    """down(activation(gate x) * (up x)) of each chosen expert, weighted and summed: float64 (T, C), and how far a kernel's result
    may be off. `steepest` is the activation's largest slope (silu's and gelu's by default)."""
    import torch

    total, error = torch.zeros_like(x_TC, dtype=torch.float64), torch.zeros_like(x_TC, dtype=torch.float64)
    for number in index_TK.unique().tolist():
        token, place = torch.where(index_TK == number)
        expert, x, weight = every[number], x_TC[token], weights_TK[token, place].double()[:, None]
        gate, up = linear(x, expert.gate), linear(x, expert.up)
        gate_off, up_off = linear_error(x, expert.gate, expert.rounded[0]), linear_error(x, expert.up, expert.rounded[1])
        inner = activation(gate) * up
        inner_off = steepest * gate_off * (up.abs() + up_off) + activation(gate).abs() * up_off + 4e-6 * (gate * up).abs() + 1e-30
        result = linear(inner, expert.down)
        off = inner_off @ expert.down.double().abs().T + linear_error(inner.abs() + inner_off, expert.down, expert.rounded[2])
        total.index_add_(0, token, weight * result)
        error.index_add_(0, token, weight.abs() * (off + 1e-6 * result.abs()))
    return total, error
