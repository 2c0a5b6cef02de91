"""The files of a folder of kept blocks, and what is evicted from it so that a quota holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
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

    def room_for(self, chain: list[bytes]) -> Room:
        """What there is for blocks of a prompt, whose own files are never evicted."""
        mine = {each.hex() for each in chain}
        files = sorted(self) if self.quota_bytes is not None else []
        old = [file for file in files if file.links == 1 and file.path.stem not in mine]
        return Room(self.quota_bytes, sum(file.nbytes for file in files), iter(old))

    def remove_unfinished(self) -> None:
        """What a killed process was writing: whoever writes one holds the lock."""
        for path in self.folder.glob("*" + UNFINISHED):
            path.unlink(missing_ok=True)


@dataclass
class Room:
    """Within a quota, as it was found at once: of `held` bytes, of files that may be evicted, what was used longest ago first."""

    quota_bytes: int | None
    held: int
    old: Iterator[KeptFile]

    def take(self, wanted_bytes: int) -> bool:
        """Count so many bytes more, and evict until there is room for them. False where there is none."""
        if self.quota_bytes is None:
            return True
        while self.held + wanted_bytes > self.quota_bytes:
            if (file := next(self.old, None)) is None:
                return False
            file.path.unlink(missing_ok=True)
            self.held -= file.nbytes
        self.held += wanted_bytes
        return True

    def remove(self, path: Path) -> None:
        """A file that is no good, if it is there."""
        with suppress(FileNotFoundError):
            nbytes = path.lstat().st_size
            path.unlink()
            self.held -= nbytes
