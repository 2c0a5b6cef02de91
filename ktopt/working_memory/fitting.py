"""Whether devices hold what they must, and which chunk of a prompt, and which context, they would hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ktopt.diagnostics import KtoptError
from ktopt.plan import Plan
from ktopt.working_memory.devices import DeviceMemory, Reckoning

LEAST_CHUNK = 16
"""The least chunk_size that is proposed: smaller ones make a prompt slow and hardly need less."""


def over_limits(memory: Sequence[DeviceMemory], limits: Mapping[str, int]) -> list[DeviceMemory]:
    """Devices that hold more than their limit."""
    return [each for each in memory if limits.get(each.device) and each.together > limits[each.device]]


def fitting_chunk(plan: Plan | Reckoning, context: int, limits: Mapping[str, int], batch: int = 1) -> int | None:
    """The largest chunk_size, a power of two, with which every device holds no more than its limit; None where none does."""
    reckoning = plan if isinstance(plan, Reckoning) else Reckoning(plan)
    sizes = (1 << power for power in range(min(context.bit_length(), 16), LEAST_CHUNK.bit_length() - 2, -1))
    return next((size for size in sizes if _fits(reckoning, context, batch, size, limits)), None)


def fitting_context(
    reckoning: Reckoning, context: int, limits: Mapping[str, int], batch: int = 1, chunk_size: int | None = None
) -> int:
    """The most tokens, fewer than `context`, that every device has room for; 0 where there is none for a single one."""
    least, most = 0, context
    while most - least > 1:
        middle = (least + most) // 2
        if _fits(reckoning, middle, batch, chunk_size, limits):
            least = middle
        else:
            most = middle
    return least


def _fits(reckoning: Reckoning, context: int, batch: int, chunk_size: int | None, limits: Mapping[str, int]) -> bool:
    try:
        return not over_limits(reckoning.memory(context, batch, chunk_size, limits), limits)
    except KtoptError:  # of a cache of blocks, that it doesn't fit
        return False
