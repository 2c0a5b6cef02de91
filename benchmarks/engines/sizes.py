"""What an engine is asked to measure, as the JSON on its command line, and its own peak memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

BATCH, UNITS = 2048, 512
"""llama-bench's own batch sizes."""


@dataclass(frozen=True)
class Task:
    """One run of an engine.

    model     a GGUF file
    variant   of the engine: flash or plain for llama.cpp; a dtype, and an implementation of experts, for transformers
    baseline  do nothing but import, and multiply two small matrices
    warm_up   tokens of a prompt that is read first, untimed
    """

    model: str
    variant: str
    threads: int
    prefill: list[int]
    decode: int
    depths: list[int]
    warm_up: int
    baseline: bool = False

    @property
    def context(self) -> int:
        longest = max([*self.prefill, *(depth + self.decode + 8 for depth in self.depths), self.warm_up + 8])
        return -(-longest // 256) * 256


def read_task(text: str) -> Task:
    return Task(**json.loads(text))


def peak_bytes() -> int:
    """The most that this process has had in RAM, mapped pages included."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
