"""Memory that the CPU kernels keep for what stands between products: it grows to the most that a call needed, and stays.

Left out is what each thread has for itself, tiles that fit its caches. Legend: T tokens that a call computes together.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktopt.operators.latent_memory import FLOAT_BYTES, LatentSizes
from ktopt.operators.model_sizes import ModelSizes
from ktopt.plan import Step

TOGETHER = 512
"""Tokens that go through a layer at a time (kernels/cpu/layer.cpp)."""
BLOCK_NUMBERS, BLOCK_BYTES = 256, 384
"""Activations rounded to 8 bits: so many in so many bytes, sums and scales included (kernels/cpu/types.h)."""
PLACE_BYTES = 12
"""What a token costs for each of its experts in the order of experts."""


def rounded(columns: int) -> int:
    """Bytes of a row of activations in 8 bits."""
    return -(-columns // BLOCK_NUMBERS) * BLOCK_BYTES


def slab_bytes(tokens: int, sizes: ModelSizes, latent: LatentSizes | None) -> int:
    """What a layer keeps between its products for T tokens: hidden states normed and made, the widest results, those rounded."""
    attended = sizes.heads * sizes.head_dim
    results = [2 * sizes.inner, attended * 2 + 2 * sizes.kv_heads * sizes.head_dim]
    widest = [sizes.hidden, attended, sizes.inner]
    if latent is not None:
        query, attended = latent.heads * (latent.nope + latent.rope), latent.heads * latent.value
        results[1] = (sizes.q_rank or query) + latent.token_numbers + query + attended
        widest[1] = max(attended, sizes.q_rank)
    results.append(sizes.experts + 2 * sizes.chosen + 2)
    return tokens * ((2 * sizes.hidden + max(results)) * FLOAT_BYTES + rounded(max(widest)))


def expert_bytes(tokens: int, sizes: ModelSizes, stored: Sequence[str], shared: int = 0) -> int:
    """What a layer's experts keep for T tokens: each token's inner layer in every expert that it goes to, and those of `shared`
    numbers that all go through."""
    numbers = not stored or set(stored) <= {"F32", "F16", "BF16"}
    inners = [sizes.expert_inner] * sizes.chosen + [shared] * bool(shared)
    return tokens * sum((inner * FLOAT_BYTES if numbers else rounded(inner)) + PLACE_BYTES for inner in inners)


def running_op(step: Step) -> str:
    """The inner op that runs in a row of a plan."""
    asked = str(step.kwargs.get("generate_op", ""))
    return step.runs.get(asked, (asked, ""))[0]
