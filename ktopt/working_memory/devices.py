"""What each device holds for a context: weights, its part of the cache, and the worst moments of loading, prefill and decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ktopt.graph import ModuleGraph
from ktopt.placement import Working
from ktopt.plan import Plan, Step
from ktopt.plan_diff import device_bytes
from ktopt.weights.source import StoredTensor
from ktopt.working_memory.blocks import DISK, block_bytes
from ktopt.working_memory.loading import loading_peaks
from ktopt.working_memory.parts import RunningModule, blocked, part_of, parts_of, text_config
from ktopt.working_memory.passing import Pass, Peak, last_piece, peaks, working_of

RUNNING_BYTES, LOADING_BYTES = 16_000_000, 11_000_000
"""What a process that runs a model takes in main memory beside what its plan says, and one that has loaded it: pages of torch's
code and the kernels' that are mapped when they are first run, the plan, the tree and the modules as Python's objects, and what an
allocator holds back. Measured over one that has imported the same, on random models of a few MB (benchmarks/memory.py --models
tiny): 15 to 18 MB, and 9 to 13, whatever the plan."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device.

    prefill, decode   the most beside weights and cache while the last piece of a prompt, and while a token, passes
    loading           the most while weights are loaded, those that are there included
    process_bytes     of the process itself while it runs, in main memory; while it loads LOADING_BYTES
    """

    device: str
    weight_bytes: int
    cache_bytes: int
    prefill: Peak
    decode: Peak
    loading: Peak
    process_bytes: int

    @property
    def transient_bytes(self) -> int:
        return max(self.prefill.nbytes, self.decode.nbytes)

    @property
    def together(self) -> int:
        """The most at any time."""
        return max(self.weight_bytes + self.cache_bytes + self.transient_bytes + self.process_bytes, self.loading.nbytes)


class Reckoning:
    """A plan made ready to be asked for several contexts.

    graph    its module tree, without which nothing is known of how weights are made while they are loaded
    stored   how its parameters are stored, where a weight file was given
    """

    def __init__(self, plan: Plan, graph: ModuleGraph | None = None, stored: Mapping[str, StoredTensor] | None = None) -> None:
        self.plan = plan
        self.parts: Sequence[RunningModule] = tuple(parts_of(plan))
        self.weights = device_bytes(plan)
        self.loading = {
            device: replace(peak, nbytes=peak.nbytes + LOADING_BYTES * (device == "cpu"))
            for device, peak in loading_peaks(plan, graph, stored).items()
        }

    def memory(
        self, context: int, batch: int = 1, chunk_size: int | None = None, limits: Mapping[str, int] | None = None
    ) -> list[DeviceMemory]:
        """What each device holds when the last piece of a context of so many tokens of each sequence is computed, and when the
        next token is.

        chunk_size   stands for what the plan says
        limits       what devices have: a cache of blocks takes what the rest leaves of it, where kvc2 gives no number

        Of a cache of blocks main memory has its part, "cpu", and so has the disk, "disk". KtoptError where such a cache doesn't
        fit.
        """
        piece = last_piece(self.plan, context, batch, chunk_size)
        prefill = peaks(self.plan, self.parts, piece)
        decode = peaks(self.plan, self.parts, Pass(batch, 1, context, chunk_size), before=piece)
        caches = self._caches(piece)
        if steps := self._blocked():
            room = {}
            for device in steps:
                moment = max(each.get(device, Peak()).nbytes for each in (prefill, decode))
                if have := (limits or {}).get(device):
                    room[device] = max(0, have - self.weights.get(device, 0) - caches.get(device, 0) - moment)
            for name, count in block_bytes(self.plan, steps, context, piece.tokens, room, batch).items():
                caches[name] = caches.get(name, 0) + count
        names = sorted({*self.weights, *caches, *prefill, *self.loading}, key=lambda name: (name == DISK, name))
        none = Peak()
        return [
            DeviceMemory(
                device=name,
                weight_bytes=self.weights.get(name, 0),
                cache_bytes=caches.get(name, 0),
                prefill=prefill.get(name, none),
                decode=decode.get(name, none),
                loading=self.loading.get(name, none),
                process_bytes=RUNNING_BYTES * (name == "cpu"),
            )
            for name in names
        ]

    def _caches(self, piece: Pass) -> dict[str, int]:
        """By device, caches that aren't in blocks."""
        found: dict[str, int] = {}
        for part in self.parts:
            working = working_of(self.plan, part, piece)
            if working.cache_bytes:
                found[part.step.generate_device] = found.get(part.step.generate_device, 0) + working.cache_bytes
        return found

    def _blocked(self) -> dict[str, list[Step]]:
        """By device, attention whose cache is in blocks."""
        found: dict[str, list[Step]] = {}
        for part in self.parts:
            for step in blocked(part):
                found.setdefault(step.generate_device, []).append(step)
        return found


def working_memory(
    plan: Plan, context: int, chunk_size: int | None = None, limits: Mapping[str, int] | None = None, batch: int = 1
) -> list[DeviceMemory]:
    """What each device holds for a context, by the plan alone: as `Reckoning.memory`."""
    return Reckoning(plan).memory(context, batch, chunk_size, limits)


def attention_working(plan: Plan, step: Step, context: int, piece: int, chunk_size: int | None = None, batch: int = 1) -> Working:
    """What one attention module holds for a context, or the layer that computes it, and while a piece of the prompt is read."""
    part = part_of(plan, step)
    return Working() if part is None else part.working(text_config(plan), batch, piece, context, chunk_size)
