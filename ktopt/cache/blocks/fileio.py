"""Reading and writing of files through descriptors: whole, or an error."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ktopt.cache.blocks.files import BlockHeader, FileShape, ForeignFile, parse_header

IOV_MAX = 1024
"""Buffers that one call takes."""


def read_header(shape: FileShape, path: Path) -> BlockHeader:
    """Of a file. ForeignFile where it isn't one of this shape, whole, and our own; OSError where it can't be read."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # nobody may be writing into a pipe
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ForeignFile("is no regular file")
        if found.st_uid != os.geteuid():
            raise ForeignFile("belongs to somebody else")
        return parse_header(shape, os.pread(fd, shape.header_bytes, 0), found.st_size)
    finally:
        os.close(fd)


def write_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    """All of the buffers, one after the other, from `offset` on. OSError where the disk takes no more."""
    while buffers:
        done = os.pwritev(fd, buffers[:IOV_MAX], offset)
        offset += done
        buffers = _rest(buffers, done)


def read_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Fill the buffers from `offset` on. OSError where the file ends before."""
    while buffers:
        done = os.preadv(fd, buffers[:IOV_MAX], offset)
        if not done:
            raise OSError(errno.EIO, "the file ends early")
        offset += done
        buffers = _rest(buffers, done)


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
