"""The disk tier: a file for each block in a folder of the session's own, written part by part and read back verified.

A file has a temporary name until all of its layers are written; then come its header, fsync (of several files together) and its
name. The session itself reads from unfinished files too: it has their checksums in memory.

Legend: L layers, R rows, M blocks at most, P = L*R*M parts in this order.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktopt.cache.blocks.fileio import read_all, read_header, sync_folder, write_all
from ktopt.cache.blocks.files import PAGE, BlockHeader, FileShape, pack_header, rounded_to_page
from ktopt.cache.blocks.folders import SessionFolder
from ktopt.cache.blocks.handles import Handle, Handles
from ktopt.cache.blocks.statistics import megabytes
from ktopt.diagnostics import KtoptError

log = logging.getLogger(__name__)

FSYNC_FILES = 16
"""Finished files that are made durable together."""
ABSENT, UNFINISHED, FINISHED = 0, 1, 2
ENDINGS = (".part", ".part", ".block")
BLOCK_INDEX_BYTES = 3
"""What a block's state and its count of written layers take."""
CHECKSUM_BYTES = 4
MOST_OPEN_FILES = 4096


class DiskTier:
    """Blocks in `folder`, which is made where it is missing, and never more than `disk_bytes` of them.

    `direct` reads past the page cache (O_DIRECT, or where the file system knows no such thing, by dropping pages after each read),
    so that reads cost what the disk costs. `durable` is for files that other sessions may use: they are fsynced. `readers` are the
    reads under way at a time, by `read_parts` (kernels.cpu.block_io) where it is given, else by threads. One store opens a tier;
    `read` may be called from several threads while one writes.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model_hash: str = "",
        disk_bytes: int | None = None,
        direct: bool = False,
        durable: bool = True,
        readers: int = 8,
        open_files: int | None = None,
        read_parts: Callable[..., tuple[int, int]] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.model_hash, self.disk_bytes, self.direct, self.durable = model_hash, disk_bytes, direct, durable
        self.readers, self.read_parts = readers, read_parts
        self._open_files = open_files

    def open(self, shape: FileShape, max_blocks: int) -> None:
        """Make the session's folder. KtoptError where there can't be one."""
        self.shape = shape
        self.handles = Handles(self._open_files or min(2 * max_blocks, _files_to_open()), self._open_file)
        self._states_M = np.zeros(max_blocks, dtype=np.uint8)
        self._layers_written_M = np.zeros(max_blocks, dtype=np.uint16)
        self.checksums_LRM = np.zeros((shape.layers, shape.rows, max_blocks), dtype=np.uint32)
        self._unsynced: list[int] = []
        self.held_bytes = self.written_bytes = 0
        self.session = SessionFolder(self.folder)
        self._folder = str(self.session.path)
        self._drop_pages = False
        if self.direct and not self._knows_direct():
            log.warning("%s: the file system knows no direct reads; pages are dropped after each read instead", self.folder)
            self.direct, self._drop_pages = False, True

    def overhead_bytes(self, shape: FileShape, max_blocks: int) -> int:
        """What a tier keeps in memory: its index, and the buffers of its readers and of the thread that they read for."""
        pieces = 2 * self.readers if self.read_parts else self.readers + 1
        buffers = pieces * buffer_bytes(shape) if self.direct else 0
        return max_blocks * (BLOCK_INDEX_BYTES + CHECKSUM_BYTES * shape.layers * shape.rows) + buffers

    def require_room(self, blocks: int, why: str) -> None:
        """KtoptError where the disk, or the quota, hasn't room for so many blocks."""
        wanted = blocks * self.shape.nbytes
        free = self.free_bytes()
        if wanted > free:
            raise KtoptError(
                f"{self.folder}: {blocks:,} blocks that don't fit into memory ({why}) take {megabytes(wanted)} on disk, and there "
                f"is room for {megabytes(free)}. Free some, set disk_path to a larger disk, raise cpu_memory_size_GB, or lower "
                "max_seq_len"
            )

    def free_bytes(self) -> int:
        """That can still be written: what the disk has, within the quota."""
        try:
            found = os.statvfs(self.session.path)
        except OSError:
            return 0
        free = found.f_bavail * found.f_frsize
        return free if self.disk_bytes is None else min(free, self.disk_bytes - self.held_bytes)

    def path(self, block: int) -> Path:
        """Of a block's file, as it is named now."""
        return self._path(block, int(self._states_M[block]))

    def _path(self, block: int, state: int) -> Path:
        return self.session.path / f"{block:08d}{ENDINGS[state]}"

    # writing

    def write(self, layer: int, block: int, parts_R: list[memoryview]) -> None:
        """A layer of a block. OSError where it can't be written; it can be tried again."""
        if self._states_M[block] == ABSENT:
            self._create(block)
        shape = self.shape
        checksums = [shape.checksum(block, layer, row, part) for row, part in enumerate(parts_R)]
        handle = self.handles.get(block, False)
        write_all(handle.fd, parts_R, shape.offset(layer, 0))
        self.checksums_LRM[layer, :, block] = checksums
        self.written_bytes += shape.rows * shape.layout.nbytes
        if self._layers_written_M[block] + 1 == shape.layers:
            header = BlockHeader(block, self.checksums_LRM[:, :, block])
            write_all(handle.fd, [memoryview(pack_header(shape, header))], 0)
            self._unsynced.append(block)
        self._layers_written_M[block] += 1
        if len(self._unsynced) >= FSYNC_FILES:
            self.sync()

    def sync(self) -> None:
        """Make finished files durable, and give them their names. OSError where that can't be done."""
        any_finished = bool(self._unsynced)
        while self._unsynced:
            block = self._unsynced[-1]
            handle = self.handles.get(block, False)
            if self.durable:
                os.fsync(handle.fd)
            if self._drop_pages or self.direct:
                os.posix_fadvise(handle.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with self.handles.lock:  # nobody opens it between its two names
                self._path(block, UNFINISHED).rename(self._path(block, FINISHED))
                self._states_M[block] = FINISHED
            self._unsynced.pop()
        if any_finished and self.durable:
            sync_folder(self.session.path)

    # files that outlive the session

    def finished(self, block: int) -> bool:
        return bool(self._states_M[block] == FINISHED)

    def complete(self, block: int, chain: bytes, tokens: NDArray[np.int64], extra: bytes) -> Path:
        """Write into a finished file of this session what makes it one for others; its path. OSError where that can't be done."""
        header = BlockHeader(block, self.checksums_LRM[:, :, block], chain, tokens, len(extra), zlib.crc32(extra))
        path = self.path(block)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            before = os.fstat(fd).st_size
            os.ftruncate(fd, self.shape.nbytes + len(extra))
            self.held_bytes += self.shape.nbytes + len(extra) - before
            write_all(fd, [memoryview(extra)], self.shape.nbytes)
            write_all(fd, [memoryview(pack_header(self.shape, header))], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        return path

    def adopt(self, block: int, file: Path, check: Callable[[BlockHeader], None]) -> None:
        """Take another session's file for a block's, without copying it. ForeignFile where it isn't of this shape, or `check` says
        so; OSError where it has gone."""
        link = self._path(block, FINISHED)
        os.link(file, link)
        try:
            header = read_header(self.shape, link)
            check(header)
        except BaseException:
            link.unlink()
            raise
        self._states_M[block] = FINISHED
        self.checksums_LRM[:, :, block] = header.checksums_LR
        self._layers_written_M[block] = self.shape.layers
        self.held_bytes += self.shape.nbytes + header.extra_bytes

    def hold(self, file: Path) -> None:
        """Have a link to a file that this session uses, of whatever kind. OSError where it has gone."""
        with suppress(FileExistsError):
            os.link(file, self.session.path / file.name)

    def verify(self, block: int) -> None:
        """Read all parts of a block once. KtoptError where one isn't what was written."""
        shape = self.shape
        scratch = memoryview(mmap.mmap(-1, 2 * shape.layer_bytes))  # for direct reads it begins at a page
        size = shape.layout.nbytes
        parts_R = [scratch[row * size : (row + 1) * size] for row in range(shape.rows)]
        for layer in range(shape.layers):
            self.read(layer, block, 0, parts_R, scratch[shape.layer_bytes :])

    def truncate(self, blocks: int) -> None:
        """Remove the files from block `blocks` on."""
        self._unsynced = [block for block in self._unsynced if block < blocks]
        for block in range(blocks, len(self._states_M)):
            if self._states_M[block] == ABSENT:
                continue
            size = self.shape.nbytes
            with suppress(OSError):
                size = self.path(block).stat().st_size
                self.path(block).unlink()
            self.held_bytes -= size
            self.handles.forget(block)
            self._states_M[block], self._layers_written_M[block] = ABSENT, 0

    def close(self) -> None:
        self.handles.close()
        self.session.remove()

    def _create(self, block: int) -> None:
        shape = self.shape
        if self.disk_bytes is not None and self.held_bytes + shape.nbytes > self.disk_bytes:
            raise OSError(errno.EDQUOT, f"its quota of {megabytes(self.disk_bytes)} is spent")
        fd = os.open(self._path(block, UNFINISHED), os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, shape.nbytes)
        finally:
            os.close(fd)
        self._states_M[block] = UNFINISHED
        self.held_bytes += shape.nbytes

    def _open_file(self, block: int, direct: bool) -> int:
        flags = os.O_RDONLY if direct or self._states_M[block] == FINISHED else os.O_RDWR
        ending = ENDINGS[self._states_M[block]]
        return os.open(f"{self._folder}/{block:08d}{ending}", flags | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))

    def _knows_direct(self) -> bool:
        path = self.session.path / "direct"
        path.write_bytes(bytes(PAGE))
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return False
        finally:
            path.unlink()
        return True

    # reading

    def read(self, layer: int, block: int, first_row: int, parts: list[memoryview], buffer: memoryview | None) -> None:
        """Parts of rows side by side, into memory. `buffer` begins at a page: direct reads need one. KtoptError where a part isn't
        what was written."""
        try:
            self._read(layer, block, self.shape.offset(layer, first_row), parts, buffer)
        except OSError as error:
            raise self.lost(layer, block, error.strerror or str(error)) from error
        for row, part in enumerate(parts, first_row):
            if self.shape.checksum(block, layer, row, part) != self.checksums_LRM[layer, row, block]:
                raise self.lost(layer, block)

    def _read(self, layer: int, block: int, offset: int, parts: list[memoryview], buffer: memoryview | None) -> None:
        handle = self.handles.get(block, self.direct)
        if not self.direct or buffer is None:
            read_all(handle.fd, parts, offset)
            if self._drop_pages:
                os.posix_fadvise(handle.fd, offset, sum(map(len, parts)), os.POSIX_FADV_DONTNEED)
            return
        start = offset - offset % PAGE
        wanted = rounded_to_page(offset + sum(map(len, parts))) - start
        read_all(handle.fd, [buffer[:wanted]], start)
        at = offset - start
        for part in parts:
            part[:] = buffer[at : at + len(part)]
            at += len(part)

    def files_of(self, layer: int, blocks: Iterable[int]) -> dict[int, Handle]:
        """The files of blocks of which parts of a layer are to be read. KtoptError where one can't be opened."""
        handles = {}
        for block in blocks:
            if block not in handles:
                try:
                    handles[block] = self.handles.get(block, self.direct)
                except OSError as error:
                    raise self.lost(layer, block, error.strerror or str(error)) from error
        return handles

    def drop_pages(self, files: list[int]) -> None:
        """Have the page cache forget files, where that stands for direct reads."""
        if self._drop_pages:
            for file in files:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def lost(self, layer: int, block: int, why: str | None = None) -> KtoptError:
        """The error of a block that can't be read back: why, or that its bytes are others."""
        why = why or "the bytes there are not those that were written"
        return KtoptError(
            f"{self.path(block)}: layer {layer} of block {block} can't be read back: {why}. This was its only copy: "
            "look at the disk, and compute the context anew"
        )


def _files_to_open() -> int:
    """A quarter of what the process may have open, which others need too."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_OPEN_FILES if allowed == resource.RLIM_INFINITY else max(16, min(MOST_OPEN_FILES, allowed // 4))


def buffer_bytes(shape: FileShape) -> int:
    """Of the buffer that a thread needs for direct reads: as much as a layer's parts, which begin and end at pages."""
    return shape.layer_bytes
