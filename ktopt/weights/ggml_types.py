"""GGML's storage types: number, name, elements in a block, bytes in a block.

A tensor of such a type is a sequence of rows, and a row a sequence of blocks. The numbers are those of GGUF files; a test
compares the table with the one in the gguf package.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One storage type: a block holds `block_elements` numbers in `block_bytes` bytes."""

    number: int
    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` numbers, which must be whole blocks."""
        return columns // self.block_elements * self.block_bytes


_TABLE = (
    (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8),
    (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8),
    (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56),
    (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
)  # fmt: skip

BY_NUMBER = {row[0]: GGMLType(*row) for row in _TABLE}
BY_NAME = {t.name: t for t in BY_NUMBER.values()}

NOT_DEQUANTISED = frozenset({"Q8_1", "Q8_K", "Q1_0"})
"""Types that nothing here can make numbers of: llama.cpp's own for activations, and one that gguf has no routine for."""
