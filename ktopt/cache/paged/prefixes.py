"""Pages of prefixes on disk, so that a process which starts again, even after it was killed, needn't compute them again.

A page is a file, named by a hash over the model, the cache's shape and all tokens up to the page's end. It has the header of
cache/blocks/files.py (with the tokens, and checksums of itself and of what follows) and then what each layer keeps. A thread
writes new ones, under another name until they are whole. What is damaged, or of another model or shape, isn't there: it is
removed, or left alone. Several processes may use one folder: who writes or evicts holds its lock.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktopt.cache.blocks.fileio import read_all, read_header, write_all
from ktopt.cache.blocks.files import HASH_BYTES, BlockHeader, FileShape, ForeignFile, pack_header
from ktopt.cache.blocks.folders import FolderLock
from ktopt.cache.blocks.layout import BlockLayout
from ktopt.cache.blocks.quota import BLOCK, UNFINISHED, KeptFiles
from ktopt.cache.blocks.statistics import megabytes
from ktopt.cache.paged.pools import LayerShape
from ktopt.diagnostics import KtoptError

log = logging.getLogger(__name__)

MOST_WAITING_BYTES = 256 << 20
"""Of pages that wait to be written; more are left out."""
FILLED = 0.9
"""What of the quota is left after an eviction, so that not every page asks for one."""
RECOUNT = 16
"""After so many writes the folder is looked through, since others may write there, too."""
STEP_NS = 1000
"""A page counts as used so much earlier than the one before it, so that a prefix is evicted from its end."""


@dataclass
class PrefixCounts:
    """Pages since the folder was opened: found, written, left out (no time or no room), and damaged."""

    read: int = 0
    written: int = 0
    left_out: int = 0
    damaged: int = 0


@dataclass(frozen=True)
class _Page:
    """One that waits to be written; without a body, one that has been used."""

    chain: bytes
    index: int
    ids: bytes
    body: NDArray[np.uint8] | None


class PrefixFolder:
    """Pages in `folder`, of `quota_bytes` at most there in all, of the model that `model_hash` tells from all others. A PagedCache
    opens it, once. KtoptError where the folder can't be used."""

    def __init__(self, folder: str | Path, *, model_hash: str, quota_bytes: int | None = None) -> None:
        self.folder, self.model_hash = Path(folder), model_hash
        self.counts = PrefixCounts()
        self._quota_bytes = quota_bytes
        self._known: set[bytes] = set()
        self._held_bytes = self._waiting_bytes = self._writes = 0
        self._jobs: queue.Queue[_Page | None] = queue.Queue()
        self._shape: FileShape | None = None
        self._thread = threading.Thread(target=self._write_all, name="ktopt-prefixes", daemon=True)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FolderLock(self.folder):
                KeptFiles(self.folder, None).remove_unfinished()
                self._look_around()
        except OSError as error:
            raise KtoptError(f"{self.folder}: prefixes can't be kept there: {error.strerror}") from error

    def open(self, shapes: Iterable[LayerShape], page_tokens: int) -> None:
        """Say what pages are like: of each layer, and how many tokens they have."""
        if self._shape is not None:
            raise KtoptError(f"{self.folder} is open for a cache already: open it once for each")
        told = [(each.heads, each.key_dim, each.value_dim, str(each.dtype), each.q8_0) for each in shapes]
        self._shape = FileShape(f"{self.model_hash}|pages of {told}", BlockLayout(page_tokens, 1, 1, "F32"), 0, 0)
        self._thread.start()

    @property
    def shape(self) -> FileShape:
        assert self._shape is not None, "open it first"
        return self._shape

    @property
    def root(self) -> bytes:
        """The hash before a first page."""
        return self.shape.digest

    def following(self, chain: bytes, ids: bytes) -> bytes:
        """The hash of a page with these token ids, int32, behind the page of that hash."""
        return hashlib.blake2b(chain + ids, digest_size=HASH_BYTES).digest()

    def read(self, chain: bytes, index: int, ids: bytes) -> NDArray[np.uint8] | None:
        """What the page of this hash, the prompt's `index`th, keeps; None where it isn't there, or isn't whole and right."""
        if chain not in self._known:
            return None
        path = self._path(chain)
        try:
            header = read_header(self.shape, path)
            body = np.empty(header.extra_bytes, dtype=np.uint8)
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                read_all(fd, [body.data], self.shape.nbytes)
            finally:
                os.close(fd)
            if header.chain != chain or header.block != index or header.tokens.astype("<i4").tobytes() != ids:
                raise ForeignFile("is of other tokens")
            if _checksum(chain, body) != header.extra_checksum:
                raise ForeignFile("has damaged contents")
        except FileNotFoundError:
            self._known.discard(chain)
            return None
        except (ForeignFile, OSError) as error:
            self.counts.damaged += 1
            log.warning("%s %s; it is kept no longer", path, error)
            self._known.discard(chain)
            with suppress(OSError):
                path.unlink()
            return None
        self.counts.read += 1
        self.used(chain, index)
        return body

    def has(self, chain: bytes) -> bool:
        """Whether a page is there, or is about to be."""
        return chain in self._known

    def used(self, chain: bytes, index: int) -> None:
        """Note that a page was used."""
        self._jobs.put(_Page(chain, index, b"", None))

    def write(self, chain: bytes, index: int, ids: bytes, body: NDArray[np.uint8]) -> None:
        """Keep a page, soon. It is left out where too many wait already."""
        if self._waiting_bytes + body.nbytes > MOST_WAITING_BYTES:
            self.counts.left_out += 1
            return
        self._waiting_bytes += body.nbytes
        self._known.add(chain)
        self._jobs.put(_Page(chain, index, ids, body))

    def flush(self) -> None:
        """Wait until what was given is written."""
        self._jobs.join()

    def close(self) -> None:
        """The same, and write no more."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    @property
    def held_bytes(self) -> int:
        """Of all files in the folder, as far as is known here."""
        return self._held_bytes

    def _write_all(self) -> None:
        while (page := self._jobs.get()) is not None:
            try:
                self._write(page) if page.body is not None else self._touch(page)
            except OSError as error:
                self.counts.left_out += 1
                self._known.discard(page.chain)
                log.warning("%s: a prefix can't be kept there: %s", self.folder, error.strerror)
            finally:
                self._waiting_bytes -= 0 if page.body is None else page.body.nbytes
                self._jobs.task_done()
        self._jobs.task_done()

    def _touch(self, page: _Page) -> None:
        now = time.time_ns() - page.index * STEP_NS
        with suppress(FileNotFoundError):
            os.utime(self._path(page.chain), ns=(now, now))

    def _write(self, page: _Page) -> None:
        assert page.body is not None
        path, body = self._path(page.chain), page.body
        header = BlockHeader(
            page.index, np.zeros((0, 0), dtype=np.uint32), page.chain, np.frombuffer(page.ids, dtype=np.int32).astype(np.int64),
            body.nbytes, _checksum(page.chain, body),
        )  # fmt: skip
        with FolderLock(self.folder):
            if path.exists():
                return
            if not self._make_room(self.shape.nbytes + body.nbytes):
                self.counts.left_out += 1
                self._known.discard(page.chain)
                return
            unfinished = path.with_suffix(UNFINISHED)
            fd = os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                write_all(fd, [memoryview(pack_header(self.shape, header)), body.data], 0)
                unfinished.rename(path)
            finally:
                os.close(fd)
                unfinished.unlink(missing_ok=True)
        self.counts.written += 1

    def _make_room(self, wanted_bytes: int) -> bool:
        """Count so many bytes more, and evict what was used longest ago where the quota asks for it. False where it is less."""
        self._writes += 1
        if self._quota_bytes is not None and self._writes % RECOUNT == 0:
            self._look_around()
        if self._quota_bytes is None or self._held_bytes + wanted_bytes <= self._quota_bytes:
            self._held_bytes += wanted_bytes
            return True
        left = max(wanted_bytes, int(self._quota_bytes * FILLED))
        there = left <= self._quota_bytes and KeptFiles(self.folder, left).room_for([]).take(wanted_bytes)
        self._look_around()
        self._held_bytes += wanted_bytes if there else 0
        if not there:
            log.warning("%s: a page of %s has no room in its quota", self.folder, megabytes(wanted_bytes))
        return there

    def _look_around(self) -> None:
        """Learn what is in the folder; what waits to be written stays known."""
        files = list(KeptFiles(self.folder, None))
        self._held_bytes = sum(file.nbytes for file in files)
        there = {bytes.fromhex(file.path.stem) for file in files if file.path.suffix == BLOCK and _is_hash(file.path.stem)}
        with self._jobs.mutex:
            waiting = {page.chain for page in self._jobs.queue if page is not None and page.body is not None}
        self._known = there | waiting

    def _path(self, chain: bytes) -> Path:
        return self.folder / f"{chain.hex()}{BLOCK}"


def _checksum(chain: bytes, body: NDArray[np.uint8]) -> int:
    """Of a page's bytes, as those of this page."""
    return zlib.crc32(body.data, zlib.crc32(chain))


def _is_hash(name: str) -> bool:
    return len(name) == 2 * HASH_BYTES and not set(name) - set("0123456789abcdef")
