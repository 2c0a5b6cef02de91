"""The answer to "what does this plan take?": for `ktopt plan --context`, `ktopt.memory` and KT507."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ktopt.cache.blocks.memory import in_words
from ktopt.diagnostics import UsageError
from ktopt.graph import ModuleGraph
from ktopt.placement import Hardware
from ktopt.plan import Plan
from ktopt.weights.source import StoredTensor
from ktopt.working_memory.devices import DeviceMemory, Reckoning
from ktopt.working_memory.fitting import over_limits
from ktopt.working_memory.passing import Peak
from ktopt.working_memory.pieces import prompt_piece
from ktopt.working_memory.remedies import largest_items, listed, what_helps


@dataclass(frozen=True)
class Memory:
    """What a plan takes for a context.

    context, batch   tokens of each sequence, and how many sequences
    chunk_size       tokens of a prompt that pass at a time; None for the whole prompt
    devices          what each holds
    limits           bytes that each device has, where that is known
    machine          the machine that has them, "" where none was named
    """

    context: int
    batch: int
    chunk_size: int | None
    devices: tuple[DeviceMemory, ...]
    limits: Mapping[str, int]
    machine: str
    reckoning: Reckoning

    @property
    def over(self) -> list[DeviceMemory]:
        """Devices that would hold more than they have."""
        return over_limits(self.devices, self.limits)

    def findings(self) -> Iterator[tuple[str, str, str]]:
        """Of each device that is over its limit its name, a message with the numbers, and what would help."""
        tokens = f"{self.context:,} tokens" + (f" of each of {self.batch} sequences" if self.batch > 1 else "")
        for each in self.over:
            items = listed(largest_items(self.reckoning.plan, each, self.context))
            helps = what_helps(self.reckoning, each, self.context, self.limits, self.batch, self.chunk_size)
            yield (
                each.device,
                f"{each.device} would hold {in_words(each.together)} for {tokens}, and {self.machine} has "
                f"{in_words(self.limits[each.device])} there: the largest are {items}",
                "; ".join(helps),
            )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "context": self.context,
            "batch": self.batch,
            "chunk_size": self.chunk_size,
            "hardware": self.machine or None,
            "fits": None if not self.limits else not self.over,
            "devices": [_device(each, self.limits.get(each.device)) for each in self.devices],
        }


def _device(memory: DeviceMemory, has: int | None) -> dict[str, Any]:
    return {
        "device": memory.device,
        "weight_bytes": memory.weight_bytes,
        "cache_bytes": memory.cache_bytes,
        "prefill": _peak(memory.prefill),
        "decode": _peak(memory.decode),
        "loading": _peak(memory.loading),
        "together_bytes": memory.together,
        "has_bytes": has,
    }


def _peak(peak: Peak) -> dict[str, Any]:
    return {"bytes": peak.nbytes, "module": peak.module, "operator": peak.operator}


def limits_of(hardware: Hardware | None) -> dict[str, int]:
    """Bytes of each device of a machine, where they are known."""
    if hardware is None:
        return {}
    found = {"cpu": hardware.ram_bytes, **{device.name: device.memory_bytes for device in hardware.devices}}
    return {device: count for device, count in found.items() if count}


def memory_of(
    plan: Plan,
    context: int,
    batch: int = 1,
    *,
    chunk_size: int | None = None,
    hardware: Hardware | None = None,
    graph: ModuleGraph | None = None,
    stored: Mapping[str, StoredTensor] | None = None,
) -> Memory:
    """What a plan takes for a context. UsageError for numbers that can't be meant, KtoptError for a cache of blocks that doesn't
    fit what it may take."""
    for name, number in (("context", context), ("chunk_size", chunk_size)):
        if number is not None and number < 1:
            raise UsageError(f"{name}: a number of tokens from 1 on, not {number}")
    if batch < 1:
        raise UsageError(f"batch: a number of sequences from 1 on, not {batch}")
    reckoning, limits = Reckoning(plan, graph, stored), limits_of(hardware)
    devices = tuple(reckoning.memory(context, batch, chunk_size, limits))
    piece = chunk_size or prompt_piece(plan)
    machine = hardware.name if hardware is not None else ""
    return Memory(context, batch, piece, devices, limits, machine, reckoning)
