"""How the keys and values of a block of tokens lie in memory, and what its anchors take: sizes alone, without torch.

A block is what one row of one layer keeps of T tokens, a row being one KV head of one sequence (of latents: one sequence). Its keys
come first, a token after the other, then its values. A token's numbers are of one of ggml's kinds, in ggml's own layout: 32
numbers of Q8_0 take 34 bytes, of Q4_0 18, each with a float16 scale in front.

Legend: T tokens of a block, D numbers of a key, V of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.diagnostics import KtoptError
from ktopt.weights.ggml_types import BY_NAME

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
"""What keys and values can be kept in."""
ALIGNMENT = 64
"""Blocks begin at multiples of so many bytes from one another."""
HALF_BYTES = 2
ANCHOR_TYPES = ("FIXED", "BLOCK_MEAN", "BLOCK_MAX", "DYNAMIC", "QUEST", "KEY_INT4")


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One block of one row of a layer. `shared` is for latents: a value is the first `value_dim` numbers of its token's key, and
    nothing more is kept. KtoptError where there is no such layout."""

    tokens: int
    key_dim: int
    value_dim: int
    kind: str
    shared: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise KtoptError(f"keys and values can't be kept as {self.kind}: take one of {', '.join(KINDS)}")
        if min(self.tokens, self.key_dim, self.value_dim) < 1:
            raise KtoptError(f"a block of {self.tokens} tokens with {self.key_dim} and {self.value_dim} numbers holds nothing")
        together = BY_NAME[self.kind].block_elements
        if self.key_dim % together or self.value_dim % together:
            raise KtoptError(
                f"{self.kind} keeps {together} numbers together, which {self.key_dim} of a key and {self.value_dim} of a value are "
                "no multiples of: take FP16"
            )
        if self.shared and self.value_dim > self.key_dim:
            raise KtoptError(f"values of {self.value_dim} numbers can't be the first of keys of {self.key_dim}")

    @property
    def key_row_bytes(self) -> int:
        """Of one token's key."""
        return BY_NAME[self.kind].row_bytes(self.key_dim)

    @property
    def value_row_bytes(self) -> int:
        """From one token's value to the next one's: of shared ones a key's bytes."""
        return self.key_row_bytes if self.shared else BY_NAME[self.kind].row_bytes(self.value_dim)

    @property
    def value_offset(self) -> int:
        """Where values begin, in bytes from the block's begin."""
        return 0 if self.shared else self.tokens * self.key_row_bytes

    @property
    def nbytes(self) -> int:
        """Of the block, a multiple of 64."""
        values = 0 if self.shared else self.tokens * self.value_row_bytes
        return rounded_up(self.tokens * self.key_row_bytes + values)


def rounded_up(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def anchor_bytes(anchor_type: str, anchor_num: int, tokens: int, dim: int) -> int:
    """What a block of one row is known by takes, in bytes: all of its indexes, for keys of `dim` numbers.

    BLOCK_MEAN and BLOCK_MAX are one float16 vector; QUEST is two, of the smallest and the largest numbers; FIXED and DYNAMIC are
    `anchor_num` vectors. KEY_INT4 has QUEST's, the keys in 4 bits (with a float16 scale and minimum a token), and their signs (with
    a float16 magnitude a token, and the mean that they are signs against), of tokens in groups of 32 and numbers in groups of 16.
    KtoptError for any other type.
    """
    vector = dim * HALF_BYTES
    match anchor_type:
        case "BLOCK_MEAN" | "BLOCK_MAX":
            return vector
        case "QUEST":
            return 2 * vector
        case "FIXED" | "DYNAMIC":
            return anchor_num * vector
        case "KEY_INT4":
            numbers, padded = -(-dim // 16) * 16, -(-tokens // 32) * 32
            int4 = numbers // 2 + 2 * HALF_BYTES
            signs = numbers // 8 + HALF_BYTES
            return 3 * vector + padded * (int4 + signs)
    raise KtoptError(f"{anchor_type} is no type of anchors: take one of {', '.join(ANCHOR_TYPES)}")
