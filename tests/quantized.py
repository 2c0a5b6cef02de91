"""Random weights in GGML's storage types: valid blocks whose scales are ordinary numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block has its float16 scales."""


def block_elements(kind: str) -> int:
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator, scales: Any = None) -> np.ndarray:
    """uint8 (rows, bytes of a row): any bits, with scales drawn from `scales`, or from a normal distribution."""
    if kind not in SCALES:
        numbers = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))
        return numbers.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]).view(torch.uint8).numpy()
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for place in SCALES[kind]:
        drawn = rng.standard_normal((len(blocks), 1)) if scales is None else rng.choice(scales, (len(blocks), 1))
        blocks[:, place : place + 2] = drawn.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
