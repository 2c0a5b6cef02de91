"""How many threads compute, and on which cores: torch's and those of the CPU kernels beside each other."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ktopt.diagnostics import UsageError

SPIN_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SHORT_SPIN = "2000"
"""Rounds, some ten microseconds: about as long as a small operation."""


def calm_openmp() -> None:
    """Make torch's OpenMP threads sleep soon after an operation instead of spinning for milliseconds. Has an effect before torch is
    imported; what the user has set stays.

    A spinning thread holds a core that the CPU kernels' threads, or another program, could use: decoding SmolLM2 on 2 busy cores
    takes 25 ms a token instead of 215.
    """
    if not any(name in os.environ for name in SPIN_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = SHORT_SPIN


MOST_THREADS = 1024


@dataclass(frozen=True)
class Threads:
    """How a model is to be computed on the CPU.

    count   threads, of torch and of the CPU kernels; None leaves it to torch, which takes a core each
    cores   numbers of the cores that they may run on; empty for any
    """

    count: int | None = None
    cores: tuple[int, ...] = ()

    def stay_on_cores(self) -> None:
        """Bind this thread, and those that it starts from now on, to the cores: to be called before a pool of threads has started.
        UsageError where the system has no such call, or the process may not use one of them."""
        if not self.cores:
            return
        if not hasattr(os, "sched_setaffinity"):
            raise UsageError("--affinity: this system can't bind threads to cores")
        mine = sorted(os.sched_getaffinity(0))
        wrong = [core for core in self.cores if core not in mine]
        if wrong:
            raise UsageError(f"--affinity: this process has no core {wrong[0]}; it has {ranges(mine)}")
        os.sched_setaffinity(0, self.cores)

    def set(self) -> None:
        """Make torch and the CPU kernels, which ask torch, take so many threads; with cores alone, one for each."""
        count = self.count or len(self.cores)
        if count:
            import torch

            torch.set_num_threads(count)


def parse_threads(threads: str | None, affinity: str | None) -> Threads:
    """Threads from the texts of --threads and --affinity. UsageError for what can't be meant."""
    count = None
    if threads is not None:
        if not (threads.isascii() and threads.isdigit() and len(threads) < 6 and 1 <= int(threads) <= MOST_THREADS):
            raise UsageError(f"--threads {threads}: a whole number from 1 to {MOST_THREADS}")
        count = int(threads)
    return Threads(count, parse_cores(affinity) if affinity is not None else ())


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers of a list such as "0-3,6". UsageError for what is none."""
    cores: list[int] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last or last - first > MOST_THREADS:
            raise UsageError(f"--affinity {text}: numbers of cores and ranges of them, such as 0-3,6")
        cores += range(first, last + 1)
    return tuple(dict.fromkeys(cores))


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as such a list."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


_RANGE = re.compile("([0-9]{1,6})(?:-([0-9]{1,6}))?")
