"""Blocks that outlive their session, so that a prompt which begins like an earlier one needn't be computed again.

A block is known by a hash over the model, the layout and all tokens up to its end, and its file is named by it. Sessions take files
by hard links, and give them by hard links: nothing is copied, a file that has been evicted stays with those who use it, and a
file with a second link is in use. Writers of several processes take turns by a lock; readers need none.

What stands before the first block of a BlockStore (the sink, which is kept as it is) is a file of its own, of bytes that the caller
chooses, and a block's file can carry extra bytes (its anchors).
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktopt.cache.blocks.disk import DiskTier
from ktopt.cache.blocks.fileio import read_all, read_header, sync_folder, write_all
from ktopt.cache.blocks.files import BlockHeader, FileShape, ForeignFile, chain_hashes, pack_header
from ktopt.cache.blocks.folders import FolderLock
from ktopt.cache.blocks.layout import BlockLayout
from ktopt.cache.blocks.quota import BLOCK, SINK, UNFINISHED, KeptFiles, Room
from ktopt.cache.blocks.statistics import megabytes
from ktopt.cache.blocks.store import BlockStore
from ktopt.diagnostics import KtoptError

log = logging.getLogger(__name__)

Tokens = Sequence[int] | NDArray[np.int64]
STEP_NS = 1000
"""A block counts as used so much earlier than the one before it, so that a prefix is evicted from its end."""


class PrefixStore:
    """Files in `folder`, of `quota_bytes` at most, of blocks as a BlockStore of one sequence has them: `layers`, `rows`, `layout`.
    The first `sink_blocks` blocks of a prompt are one file of the caller's own bytes. KtoptError where the folder can't be used.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model_hash: str,
        layout: BlockLayout,
        layers: int,
        rows: int,
        sink_blocks: int = 1,
        quota_bytes: int | None = None,
    ) -> None:
        self.folder, self.sink_blocks = Path(folder), sink_blocks
        self._kept = KeptFiles(self.folder, quota_bytes)
        self.shape = FileShape(model_hash, layout, layers, rows)
        sink_layout = replace(layout, tokens=layout.tokens * max(sink_blocks, 1))
        self._sink_shape = FileShape(f"{model_hash}|sink of {layers} layers", sink_layout, 0, rows)
        self._last: tuple[NDArray[np.int64], list[bytes]] = np.zeros(0, dtype=np.int64), []
        with self._in_words("kept there for later prompts"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FolderLock(self.folder):
                pass

    @property
    def held_bytes(self) -> int:
        """Of all files, other models' too."""
        return self._kept.held_bytes

    def match(self, token_ids: Tokens) -> int:
        """How many whole blocks of a prompt are there, from its first token on, the sink's included."""
        tokens, chain = self._chain(token_ids)
        for index in range(len(chain)):
            if self._header(tokens, chain, index) is None:
                return 0 if index < self.sink_blocks else index
        return len(chain)

    def attach(self, store: BlockStore, token_ids: Tokens, blocks: int | None = None, *, verify: bool = True) -> int:
        """Take what is there of a prompt, of its first `blocks` blocks at most, for the first blocks of an empty store; how many
        blocks of the prompt that are, the sink's included. With `verify` all of it is read once, and what is damaged is removed.
        KtoptError where the folder can't be used, or where store and files aren't on one file system."""
        if store.whole_blocks:
            raise KtoptError(f"blocks of an earlier prompt can only begin a cache, and this one has {store.whole_blocks} already")
        with self._in_words("taken from there"):
            self._check(store)
            return self._attach(store, token_ids, blocks, verify)

    def _attach(self, store: BlockStore, token_ids: Tokens, blocks: int | None, verify: bool) -> int:
        tokens, chain = self._chain(token_ids)
        most = min(len(chain), self.sink_blocks + store.max_blocks, len(chain) if blocks is None else blocks)
        if self.sink_blocks and (most < self.sink_blocks or not self._take_sink(store, tokens, chain)):
            return 0
        taken = self.sink_blocks
        while taken < most and self._take(store, tokens, chain, taken, verify):
            taken += 1
        self._touch(chain[:taken])
        return taken

    def sink(self, token_ids: Tokens) -> bytes | None:
        """What the caller has kept for the first blocks of a prompt."""
        return self._bytes(token_ids, self.sink_blocks - 1) if self.sink_blocks else None

    def extra(self, token_ids: Tokens, block: int) -> bytes | None:
        """What the caller has kept beside a block of a BlockStore, which stands `sink_blocks` later in the prompt."""
        return self._bytes(token_ids, self.sink_blocks + block)

    def keep(
        self, store: BlockStore, token_ids: Tokens, *, sink: bytes = b"", extra: Callable[[int], bytes] = lambda block: b""
    ) -> int:
        """Keep the blocks of a session, whose tokens these are, for others; how many of the prompt's blocks are there then. `sink`
        is for the first ones; `extra` gives bytes for a block of the store. What has no room within the quota isn't kept, and that
        is logged. KtoptError where the disk is full or the folder gone, or store and folder aren't on one file system."""
        tokens, chain = self._chain(token_ids)
        most = min(len(chain), self.sink_blocks + store.whole_blocks)
        with self._in_words("kept there for later prompts"):
            self._check(store)
            if most < max(self.sink_blocks, 1):
                return 0
            store.flush()
            with FolderLock(self.folder):
                kept = self._keep(store, tokens, chain[:most], sink, extra)
            sync_folder(self.folder)
        if kept < most:
            log.warning(
                "%s: %d of %d blocks are kept: its quota of %s holds no more",
                self.folder,
                kept,
                most,
                megabytes(self._kept.quota_bytes or 0),
            )
        return kept

    def _keep(
        self, store: BlockStore, tokens: NDArray[np.int64], chain: list[bytes], sink: bytes, extra: Callable[[int], bytes]
    ) -> int:
        assert store.disk is not None
        self._kept.remove_unfinished()
        kept, room = len(chain), self._kept.room_for(chain)
        if self.sink_blocks:
            last = self.sink_blocks - 1
            if self._header(tokens, chain, last) is None and not self._keep_sink(tokens, chain, sink, room):
                return 0
            store.disk.hold(self._path(chain, last))
        for index in range(self.sink_blocks, len(chain)):
            if self._header(tokens, chain, index) is None and not self._keep_block(store.disk, tokens, chain, index, extra, room):
                kept = index
                break
        self._touch(chain[:kept])
        return kept

    def _keep_sink(self, tokens: NDArray[np.int64], chain: list[bytes], sink: bytes, room: Room) -> bool:
        path = self._path(chain, self.sink_blocks - 1)
        shape = self._sink_shape
        room.remove(path)
        if not room.take(shape.nbytes + len(sink)):
            return False
        none = np.zeros((0, shape.rows), dtype=np.uint32)
        covered = tokens[: shape.layout.tokens]
        header = BlockHeader(0, none, chain[self.sink_blocks - 1], covered, len(sink), zlib.crc32(sink))
        unfinished = path.with_suffix(UNFINISHED)
        fd = os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, [memoryview(pack_header(shape, header)), memoryview(sink)], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        unfinished.rename(path)
        return True

    def _keep_block(
        self,
        disk: DiskTier,
        tokens: NDArray[np.int64],
        chain: list[bytes],
        index: int,
        extra: Callable[[int], bytes],
        room: Room,
    ) -> bool:
        path, block = self._path(chain, index), index - self.sink_blocks
        room.remove(path)
        if not disk.finished(block):
            return False
        beside = extra(block)
        if not room.take(self.shape.nbytes + len(beside)):
            return False
        os.link(disk.complete(block, chain[index], self._tokens_of(tokens, index), beside), path)
        return True

    def _take_sink(self, store: BlockStore, tokens: NDArray[np.int64], chain: list[bytes]) -> bool:
        assert store.disk is not None
        try:
            store.disk.hold(self._path(chain, self.sink_blocks - 1))
        except OSError:
            return False
        return self.sink(tokens) is not None

    def _take(self, store: BlockStore, tokens: NDArray[np.int64], chain: list[bytes], index: int, verify: bool) -> bool:
        block, path = index - self.sink_blocks, self._path(chain, index)
        try:
            store.adopt(block, path, lambda header: self._compare(header, tokens, chain, index))
        except (ForeignFile, OSError):
            return False
        if not verify:
            return True
        try:
            assert store.disk is not None
            store.disk.verify(block)
        except KtoptError as error:
            log.warning("%s; it is kept no longer", error)
            store.truncate(block)
            path.unlink(missing_ok=True)
            return False
        return True

    def _touch(self, chain: list[bytes]) -> None:
        now = time.time_ns()
        for index in range(max(self.sink_blocks - 1, 0), len(chain)):
            used = now - index * STEP_NS
            with suppress(FileNotFoundError, PermissionError):
                os.utime(self._path(chain, index), ns=(used, used))

    @contextmanager
    def _in_words(self, done: str) -> Iterator[None]:
        """What the operating system refuses about the folder becomes a KtoptError: that blocks can't be `done`."""
        try:
            yield
        except OSError as error:
            raise KtoptError(f"{self.folder}: blocks can't be {done}: {error.strerror or error}") from error

    def _header(self, tokens: NDArray[np.int64], chain: list[bytes], index: int) -> BlockHeader | None:
        """Of the file of a prompt's block, where it is there and is what it should be. What the sink's file covers it does once."""
        if index < self.sink_blocks - 1:
            return self._header(tokens, chain, self.sink_blocks - 1) if len(chain) >= self.sink_blocks else None
        shape = self._sink_shape if index < self.sink_blocks else self.shape
        try:
            header = read_header(shape, self._path(chain, index))
            self._compare(header, tokens, chain, index)
        except (ForeignFile, OSError):
            return None
        return header

    def _compare(self, header: BlockHeader, tokens: NDArray[np.int64], chain: list[bytes], index: int) -> None:
        """ForeignFile unless the header is that of this block of this prompt."""
        expected = tokens[: self._sink_shape.layout.tokens] if index < self.sink_blocks else self._tokens_of(tokens, index)
        if header.chain != chain[index] or not np.array_equal(header.tokens, expected):
            raise ForeignFile("is of other tokens")
        if header.block != max(index - self.sink_blocks, 0):
            raise ForeignFile(f"is of block {header.block}")

    def _bytes(self, token_ids: Tokens, index: int) -> bytes | None:
        tokens, chain = self._chain(token_ids)
        header = self._header(tokens, chain, index) if index < len(chain) else None
        if header is None:
            return None
        shape = self._sink_shape if index < self.sink_blocks else self.shape
        data = bytearray(header.extra_bytes)
        try:
            fd = os.open(self._path(chain, index), os.O_RDONLY | os.O_CLOEXEC)
            try:
                read_all(fd, [memoryview(data)] if data else [], shape.nbytes)
            finally:
                os.close(fd)
        except OSError:
            return None
        if zlib.crc32(data) != header.extra_checksum:
            path = self._path(chain, index)
            log.warning("%s: what is kept beside the blocks is damaged; the file is kept no longer", path)
            path.unlink(missing_ok=True)
            return None
        return bytes(data)

    def _tokens_of(self, tokens: NDArray[np.int64], index: int) -> NDArray[np.int64]:
        per_block = self.shape.layout.tokens
        return tokens[index * per_block : (index + 1) * per_block]

    def _chain(self, token_ids: Tokens) -> tuple[NDArray[np.int64], list[bytes]]:
        tokens = np.asarray(token_ids, dtype=np.int64)
        if not np.array_equal(tokens, self._last[0]):
            self._last = tokens.copy(), chain_hashes(self.shape, tokens)
        return self._last

    def _path(self, chain: list[bytes], index: int) -> Path:
        return self.folder / f"{chain[index].hex()}{SINK if index < self.sink_blocks else BLOCK}"

    def _check(self, store: BlockStore) -> None:
        if store.disk is None:
            raise KtoptError("blocks are reused by way of their files, and this cache has none: set disk_path")
        if store.disk.shape != self.shape:
            raise KtoptError(f"a cache of {store.disk.shape} can't use blocks of {self.shape}")
        if self.folder.stat().st_dev != store.disk.session.path.stat().st_dev:
            raise KtoptError(f"{self.folder} and {store.disk.folder} are on different file systems: keep them on one")
