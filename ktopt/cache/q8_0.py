"""Q8_0, a storage type of GGUF, as the form that a cache keeps numbers in: of each 32 a float16 scale, and 8-bit numbers that count
by it. 34 bytes hold 32 numbers; each is off by half a scale at most, 1/254 of the largest of its 32, beside the scale's rounding.
"""

from __future__ import annotations

import torch

from ktopt.diagnostics import KtoptError

NAME = "Q8_0"
NUMBERS = 32
BYTES = 34


def stored_bytes(numbers: int) -> int:
    """What so many numbers take. KtoptError where they aren't whole blocks."""
    if numbers % NUMBERS:
        raise KtoptError(f"{NAME} keeps blocks of {NUMBERS} numbers, which {numbers} numbers of a token aren't")
    return numbers // NUMBERS * BYTES


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Floats (..., W) as uint8 (..., bytes of W). KtoptError for a number beyond what the scale's float16 reaches, 8.3 million."""
    groups = x.float().unflatten(-1, (-1, NUMBERS))
    steps = groups.abs().amax(-1, keepdim=True) / 127
    scales = steps.half()
    if bool((scales.isinf() & ~steps.isinf()).any()):
        raise KtoptError(f"a number of {float(steps.max() * 127):g} is beyond {NAME}: keep the cache in bfloat16 or float32")
    numbers = (groups / steps.masked_fill(steps == 0, 1)).round().to(torch.int8)
    return torch.cat((scales.view(torch.uint8), numbers.view(torch.uint8)), dim=-1).flatten(-2)


def numbers_of(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 (..., bytes of W) as floats (..., W)."""
    blocks = stored.unflatten(-1, (-1, BYTES))
    scales = blocks[..., :2].contiguous().view(torch.float16)
    made = blocks[..., 2:].view(torch.int8).to(dtype)
    return made.mul_(scales.to(dtype)).flatten(-2)
