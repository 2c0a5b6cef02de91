"""What a block store has done so far, and what it holds: plain numbers, and rows of them for a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStatistics:
    """Counts are of parts: a part is what one row of one layer keeps of a block. Sizes are in bytes, times in seconds."""

    hits_device: int = 0
    """Parts that a fetch found in the device pool."""
    hits_host: int = 0
    """Those found in the host pool."""
    misses: int = 0
    """Parts that a fetch had to wait for: they lay on disk."""
    prefetched: int = 0
    """Parts brought from disk before they were asked for."""
    evictions: int = 0
    """Parts whose memory was taken for another."""
    put_bytes: int = 0
    """Stored in memory."""
    read_bytes: int = 0
    """Brought from disk to memory, as parts; what the disk has read for them may be more."""
    written_bytes: int = 0
    """Written to disk."""
    reads: int = 0
    """Calls that read from disk: parts that lie side by side are read together."""
    waits: int = 0
    """Times that a fetch or a put has waited for the disk."""
    wait_s: float = 0.0
    device_bytes: int = 0
    """Held in the device pool now."""
    host_bytes: int = 0
    """Held in the host pool now."""
    disk_bytes: int = 0
    """Size of the files on disk now."""
    overhead_bytes: int = 0
    """What the store keeps beside the pools: its index, and the buffers of reads. It counts inside the budgets."""
    device_budget_bytes: int = 0
    host_budget_bytes: int = 0

    @property
    def fetched(self) -> int:
        """Parts that were asked for."""
        return self.hits_device + self.hits_host + self.misses

    def table(self) -> list[tuple[str, str, str, str]]:
        """Rows of text, the first one the headings: tier, bytes held, bytes it may hold, and what a fetch found there."""
        asked = max(self.fetched, 1)
        rows = [("tier", "holds", "budget", "found there")]
        for tier, held, budget, found in (
            ("device", self.device_bytes, self.device_budget_bytes, self.hits_device),
            ("host", self.host_bytes, self.host_budget_bytes, self.hits_host),
            ("disk", self.disk_bytes, None, self.misses),
        ):
            allowed = "" if budget is None else megabytes(budget)
            rows.append((tier, megabytes(held), allowed, f"{found:,} ({found / asked:.1%})"))
        return rows

    def movements(self) -> list[tuple[str, str]]:
        """Rows of text: what has been moved, and what was waited for."""
        return [
            ("put", megabytes(self.put_bytes)),
            ("read from disk", f"{megabytes(self.read_bytes)} in {self.reads:,} reads"),
            ("written to disk", megabytes(self.written_bytes)),
            ("prefetched", f"{self.prefetched:,}"),
            ("taken out of memory", f"{self.evictions:,}"),
            ("waited", f"{self.waits:,} times, {self.wait_s:.3f} s"),
        ]


def megabytes(nbytes: int) -> str:
    """In words, decimal, with one digit behind the point."""
    return f"{nbytes / 1e6:,.1f} MB"
