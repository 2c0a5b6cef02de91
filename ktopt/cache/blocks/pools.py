"""The memory of a block store: a device pool and a host pool, cut into slots of one part each, and the budgets that bound them.

Legend: N bytes of a part, S some slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ktopt.cache.blocks.statistics import megabytes
from ktopt.cache.huge_pages import ask_for_huge_pages
from ktopt.diagnostics import KtoptError

NOBODY = -1
SLOT_INDEX_BYTES = 12
"""What a slot's owner and its place in the list of free slots take."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that a store may take in each tier, and what of them others have taken already: anchors, windows, buffers."""

    device_bytes: int
    host_bytes: int
    device_reserved_bytes: int = 0
    host_reserved_bytes: int = 0

    def slots(self, part_bytes: int, overhead_bytes: int, parts: int) -> tuple[int, int]:
        """How many slots each pool has: as many as the budget holds beside `overhead_bytes`, which are taken from the host tier,
        and from the device tier where that is too small; no more than there are parts."""
        host_room = self.host_bytes - self.host_reserved_bytes - overhead_bytes
        device_room = self.device_bytes - self.device_reserved_bytes + min(host_room, 0)
        each = part_bytes + SLOT_INDEX_BYTES
        device = min(max(device_room, 0) // each, parts)
        return device, min(max(host_room, 0) // each, parts - device)

    def in_words(self, overhead_bytes: int) -> str:
        """How it is spent, for errors."""
        reserved = self.device_reserved_bytes + self.host_reserved_bytes
        return (
            f"{megabytes(self.device_bytes)} of the device and {megabytes(self.host_bytes)} of the host, less "
            f"{megabytes(reserved)} for anchors and windows and {megabytes(overhead_bytes)} for the index and buffers"
        )


class Pools:
    """Slots 0 to `device_slots` lie in the device pool, the others in the host pool. Memory that was never written to is not taken
    from the machine."""

    def __init__(self, part_bytes: int, device_slots: int, host_slots: int) -> None:
        self.part_bytes = part_bytes
        self.device_slots = device_slots
        self.slots = device_slots + host_slots
        try:
            with torch.inference_mode(False):
                self._tensors = [
                    ask_for_huge_pages(torch.empty(count * part_bytes, dtype=torch.uint8, device="cpu"))
                    for count in (device_slots, host_slots)
                ]
        except RuntimeError as error:
            wanted = megabytes(self.slots * part_bytes)
            raise KtoptError(f"the cache's {wanted} can't be had from this machine: give it smaller budgets") from error
        self._bytes = [tensor.numpy().reshape(-1, part_bytes) for tensor in self._tensors]
        self._memory = [memoryview(tensor.numpy()) for tensor in self._tensors]
        self._bases = [tensor.data_ptr() for tensor in self._tensors]
        self.owner = np.full(self.slots, NOBODY, dtype=np.int64)
        """The part that a slot holds, or is being filled with."""
        self._free = np.arange(self.slots, dtype=np.int32)[::-1].copy()
        self._free_count = self.slots

    @property
    def nbytes(self) -> int:
        """All that the pools may come to take, their index included."""
        return self.slots * (self.part_bytes + SLOT_INDEX_BYTES)

    @property
    def free(self) -> int:
        return self._free_count

    def held(self) -> tuple[int, int]:
        """Bytes of parts in the device and in the host pool."""
        device = int(np.count_nonzero(self.owner[: self.device_slots] != NOBODY))
        return device * self.part_bytes, (self.slots - self._free_count - device) * self.part_bytes

    def take(self, parts_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """Free slots for these parts, of which there must be as many: those of the device pool first, as long as they are new."""
        rest = self._free_count - len(parts_S)
        slots_S = self._free[rest : self._free_count][::-1].astype(np.int64)
        self._free_count = rest
        self.owner[slots_S] = parts_S
        return slots_S

    def give_back(self, slots_S: NDArray[np.int64]) -> None:
        self.owner[slots_S] = NOBODY
        self._free[self._free_count : self._free_count + len(slots_S)] = slots_S
        self._free_count += len(slots_S)

    def addresses(self, slots_S: NDArray[np.int64]) -> NDArray[np.int64]:
        device, host = self._bases
        addresses_S: NDArray[np.int64] = np.where(
            slots_S < self.device_slots,
            device + slots_S * self.part_bytes,
            host + (slots_S - self.device_slots) * self.part_bytes,
        )
        return addresses_S

    def slots_at(self, addresses_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots that `addresses` told of."""
        device_S = self.on_device(addresses_S)
        offsets_S = addresses_S - np.where(device_S, self._bases[0], self._bases[1])
        slots_S: NDArray[np.int64] = offsets_S // self.part_bytes + np.where(device_S, 0, self.device_slots)
        return slots_S

    def on_device(self, addresses_S: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an address lies in the device pool."""
        inside: NDArray[np.bool_] = (addresses_S - self._bases[0]).view(np.uint64) < self.device_slots * self.part_bytes
        return inside

    def write(self, slots_S: NDArray[np.int64], data_SN: NDArray[np.uint8]) -> None:
        device_S = slots_S < self.device_slots
        if device_S.all():
            self._bytes[0][slots_S] = data_SN
        elif not device_S.any():
            self._bytes[1][slots_S - self.device_slots] = data_SN
        else:
            self._bytes[0][slots_S[device_S]] = data_SN[device_S]
            self._bytes[1][slots_S[~device_S] - self.device_slots] = data_SN[~device_S]

    def memory(self, slot: int) -> memoryview:
        """A slot's bytes, to be read and written."""
        which, index = (0, slot) if slot < self.device_slots else (1, slot - self.device_slots)
        return self._memory[which][index * self.part_bytes : (index + 1) * self.part_bytes]
