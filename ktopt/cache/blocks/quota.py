"""The files of a folder of kept blocks, and what is evicted from it so that a quota holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK, SINK, UNFINISHED = ".block", ".sink", ".tmp"


@dataclass(frozen=True, order=True)
class KeptFile:
    """`used_ns` is the time of its last use; `links` more than one say that a session uses it now."""

    used_ns: int
    nbytes: int
    links: int
    path: Path


@dataclass(frozen=True)
class KeptFiles:
    """Of all models. Who changes anything holds the folder's lock."""

    folder: Path
    quota_bytes: int | None

    def __iter__(self) -> Iterator[KeptFile]:
        for path in self.folder.iterdir():
            if path.suffix in (BLOCK, SINK):
                try:
                    found = path.lstat()
                except FileNotFoundError:
                    continue
                yield KeptFile(found.st_mtime_ns, found.st_size, found.st_nlink, path)

    @property
    def held_bytes(self) -> int:
        return sum(file.nbytes for file in self)

    def make_room(self, wanted_bytes: int, chain: list[bytes]) -> bool:
        """Evict what was used longest ago, by nobody now, and not of this chain, until there is room. False where there is none."""
        if self.quota_bytes is None:
            return True
        files = sorted(self)
        held = sum(file.nbytes for file in files)
        mine = {each.hex() for each in chain}
        for file in files:
            if held + wanted_bytes <= self.quota_bytes:
                break
            if file.links == 1 and file.path.stem not in mine:
                file.path.unlink(missing_ok=True)
                held -= file.nbytes
        return held + wanted_bytes <= self.quota_bytes

    def remove_unfinished(self) -> None:
        """What a killed process was writing: whoever writes one holds the lock."""
        for path in self.folder.glob("*" + UNFINISHED):
            path.unlink(missing_ok=True)
