"""What latent attention holds beside its weights, in bytes: its cache, and the most that a prefill takes while a layer runs.
Attention takes the sizes of its tiles from here, and plans their memory.

Symbols are those of the model's config: N heads, P qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim, L kv_lora_rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

TILE_SCORES = {"cpu": 1 << 22}
"""Scores of a tile, float32, by kind of device: on a CPU they should stay in its caches between the passes over them."""
OTHER_SCORES = 1 << 26
LEAST_QUERIES, LEAST_TOKENS = 64, 512
"""What a tile has at least: fewer queries make slow products, and with fewer tokens the sums so far are scaled too often."""
FLOAT_BYTES = 4
KEPT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Q8_NUMBERS, Q8_BYTES = 32, 34
"""A block of Q8_0: so many numbers in so many bytes."""
EXPANDED_BYTES = 64 << 20
"""What a prompt's expanded keys and values take on a CPU, at most, unless those of one head take more."""


def steps(batch: int, heads: int, queries: int, kind: str) -> tuple[int, int]:
    """Queries and tokens of a tile on a kind of device."""
    budget = TILE_SCORES.get(kind, OTHER_SCORES) // (batch * heads)
    step = min(queries, max(LEAST_QUERIES, min(isqrt(budget), budget // LEAST_TOKENS)))
    return step, max(LEAST_TOKENS, budget // max(1, step))


@dataclass(frozen=True)
class LatentSizes:
    """The numbers of a model's latent attention."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    hidden: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LatentSizes | None:
        """From a model's config; None where it has none."""
        names = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "hidden_size")
        values = [config.get(name) for name in names]
        return cls(*values) if all(isinstance(value, int) for value in values) else None  # type: ignore[arg-type]

    @property
    def token_numbers(self) -> int:
        """Numbers of a token in the latent cache."""
        return self.latent + self.rope

    @property
    def expanded_numbers(self) -> int:
        """Numbers of a token in a cache of keys and values of all heads."""
        return self.heads * (self.nope + self.rope + self.value)


def prefers_absorbed(queries: int, context: int, sizes: LatentSizes) -> bool:
    """Whether absorbed attention takes fewer operations than expanded, of one head: queries and their results are multiplied by
    W_UK and W_UV instead of the whole context, and each pair of query and token costs 2 L + R products instead of P + R + V."""
    pairs = queries * (context - queries / 2)
    matrix = sizes.latent * (sizes.nope + sizes.value)
    absorbed = queries * matrix + pairs * (2 * sizes.latent + sizes.rope)
    return absorbed < context * matrix + pairs * (sizes.nope + sizes.rope + sizes.value)


def kept_bytes(numbers: int, kv_dtype: str, item: int) -> tuple[int, int]:
    """What a token's numbers take in a latent cache, and each of them where attention reads it. `item` is the bytes of a number
    where kv_dtype doesn't say."""
    if kv_dtype == "q8_0":
        return -(-numbers // Q8_NUMBERS) * Q8_BYTES, item
    each = KEPT_BYTES.get(kv_dtype, item)
    return numbers * each, each


def heads_together(heads: int, head_bytes: int) -> int:
    """How many heads are expanded at a time on a CPU."""
    return max(1, min(heads, EXPANDED_BYTES // head_bytes))


def heads_a_run(heads: int, queries: int, numbers: int, item: int) -> int:
    """How many heads FlashInfer attends with at a time, where each query of a head takes so many numbers: together no more bytes
    than a tile's scores take in torch. A divisor of the heads."""
    most = OTHER_SCORES * (FLOAT_BYTES + item) // (queries * numbers * item)
    return next(count for count in range(max(1, min(heads, most)), 0, -1) if heads % count == 0)


def transient_bytes(
    sizes: LatentSizes,
    queries: int,
    context: int,
    absorbed: bool,
    item: int,
    kind: str,
    *,
    quantized: bool = False,
    read: int | None = None,
    batch: int = 1,
) -> int:
    """The most that attention holds at once for a chunk of `queries` after which the context is `context` tokens, beside its input,
    its result and the cache. `item` is the bytes of a number, `read` those of one of the cache where they are others, `batch` the
    sequences. Temporary memory inside one operation is not in it.

    The most is held while a tile of scores is added to the softmax so far (FlashInfer takes no more than that); on a CPU, where a
    kernel keeps no scores, while the last heads are expanded (in float32 or bfloat16, whichever the cache has). Latents that are
    `quantized` are made numbers where they are read.
    """
    key, value = sizes.nope + sizes.rope, sizes.value
    asked = batch * queries * sizes.heads * key * item
    if kind == "cpu" and not absorbed:
        each = read or item
        together = heads_together(sizes.heads, context * (key + value) * each)
        expanded = together * context * (sizes.nope + key + 2 * value) * each
        expanded += context * sizes.token_numbers * each * quantized
        widened = queries * sizes.heads * key * FLOAT_BYTES * (item != FLOAT_BYTES)
        return asked + widened + batch * queries * sizes.heads * value * FLOAT_BYTES + expanded
    step, tokens = steps(batch, sizes.heads, queries, kind)
    tokens = min(tokens, context)
    scores = batch * sizes.heads * step * tokens * (FLOAT_BYTES + (item if item < FLOAT_BYTES else 0))
    scores += batch * tokens * sizes.token_numbers * item * quantized
    if absorbed:
        held = batch * step * sizes.heads * (sizes.token_numbers * item + sizes.latent * (2 * FLOAT_BYTES + item))
        return asked + batch * queries * sizes.heads * value * item + held + scores
    tile = batch * tokens * sizes.heads * (sizes.nope + value + key) * item
    sums = batch * queries * sizes.heads * value * FLOAT_BYTES + batch * step * sizes.heads * (
        key * item + value * (FLOAT_BYTES + item)
    )
    return asked + tile + sums + scores
