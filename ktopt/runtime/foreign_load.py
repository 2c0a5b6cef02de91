"""How busy others keep the machine while something is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Columns of /proc/stat's cpu line that count idle time: idle, and idle while waiting for a disk."""
_GUESTS = 8
"""Columns from here on are counted in earlier ones already."""


class ForeignLoad:
    """From its making on: how many cores, on average, other processes used. `cores()` is None where the system doesn't say."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), _busy_s(), _own_s()

    def cores(self) -> float | None:
        busy, took = _busy_s(), time.perf_counter() - self._start
        if busy is None or self._busy is None or took <= 0:
            return None
        return max(0.0, busy - self._busy - (_own_s() - self._own)) / took


def _busy_s() -> float | None:
    """Seconds that all cores together have worked since the machine started."""
    try:
        columns = [int(word) for word in _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1 : 1 + _GUESTS]]
    except (OSError, ValueError):
        return None
    return sum(count for i, count in enumerate(columns) if i not in _IDLE) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Seconds that this process and its ended children have worked."""
    return sum(os.times()[:4])
