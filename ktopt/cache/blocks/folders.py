"""The folder that one session keeps its blocks in: its own, private, and gone when the session is.

A session holds a lock on a file in its folder for as long as it lives, so that the next one knows the folders of those that were
killed, and removes them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from ktopt.diagnostics import KtoptError

PREFIX = "session-"
LOCK = "lock"


def folder_at(path: str) -> Path:
    """The folder that `disk_path` names, which needn't be there yet. KtoptError where there can be none of that name."""
    try:
        folder = Path(path).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.stat(folder)
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise KtoptError(f"`disk_path: {path[:80]!r}` can't be a folder: {why}. Write another one") from error
    return folder


class SessionFolder:
    """A new folder inside of `parent`, which is made where it is missing. KtoptError where that can't be."""

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FolderLock(parent):
                remove_stale(parent)
                self.path = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
                self.path.mkdir(mode=0o700)
                lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise KtoptError(
                f"{parent}: blocks of the cache can't be kept there: {error.strerror}. Set disk_path to a folder that can be "
                "written to"
            ) from error
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        """With all that is in it. Happens by itself when the interpreter ends."""
        self._finalizer()


class FolderLock:
    """While it is held no other process holds the same folder's. A killed process holds none."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"

    def __enter__(self) -> None:
        self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def remove_stale(parent: Path) -> int:
    """Remove the folders of sessions that have ended without doing so; how many. Call it while holding the parent's lock."""
    removed = 0
    for folder in parent.glob(PREFIX + "*"):
        if folder.is_symlink() or not folder.is_dir() or _alive(folder):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        removed += 1
    return removed


def _alive(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not ours to judge
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a fork ends without taking its parent's folder along
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        os.close(lock)
