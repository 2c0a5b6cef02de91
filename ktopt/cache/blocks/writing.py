"""Write-behind: a thread that writes parts to disk, straight from their slots, while the store goes on.

A part that hasn't been written can't leave memory, so that slots themselves are the queue, and its bound.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ktopt.cache.blocks.disk import DiskTier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A layer of a block, and the slots of its rows."""

    layer: int
    block: int
    slots: list[int]


class WriteBehind:
    """Writes what is added, in that order, once it has been told to begin. A disk that takes no more stops it until `retry`."""

    def __init__(self, disk: DiskTier, memory: Callable[[int], memoryview]) -> None:
        self._disk = disk
        self._memory = memory
        self._pending: deque[Job] = deque()
        self._written: deque[Job] = deque()
        self._changed = threading.Condition()
        self._begun = self._busy = self._closing = self._sync = False
        self.error: OSError | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="ktopt-write-behind", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Layers of blocks that are not on disk."""
        return len(self._pending)

    @property
    def begun(self) -> bool:
        return self._begun

    def add(self, job: Job) -> None:
        with self._changed:
            self._pending.append(job)
            if self._begun:
                self._changed.notify_all()

    def begin(self) -> None:
        """Write from now on: until then nothing is, since it may all fit into memory."""
        with self._changed:
            self._begun = True
            self._changed.notify_all()

    def take_written(self) -> list[Job]:
        """What has been written since this was last asked."""
        taken = []
        while self._written:
            taken.append(self._written.popleft())
        return taken

    def wait_for_progress(self) -> bool:
        """Until something is written that `take_written` hasn't told. False where nothing will be. Tries a full disk again."""
        with self._changed:
            for _ in range(2):  # the first error may be of a write that had begun before there was room
                self._begun, self.error = True, None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._written or self.error or not self._pending)
                if self._written or not self.error:
                    break
            return bool(self._written)

    def flush(self) -> bool:
        """Until all is written, durable and under its name. False where the disk doesn't take it: `error` says why."""
        with self._changed:
            self._begun, self._sync, self.error = True, True, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.error or not (self._pending or self._sync))
            self._sync = False
            return self.error is None

    def truncate(self, blocks: int) -> None:
        """Forget what hasn't been written of the blocks from `blocks` on, and remove their files."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
            self._pending = deque(job for job in self._pending if job.block < blocks)
            self._disk.truncate(blocks)

    def close(self) -> None:
        """End the thread, with what it is at; the rest stays unwritten."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._has_work())
                if self._closing:
                    return
                job = self._pending[0] if self._pending else None
                self._busy = True
            error = self._do(job)
            with self._changed:
                self._busy = False
                if error is not None:
                    self.error = error
                elif job is None:
                    self._sync = False
                else:
                    self._written.append(self._pending.popleft())
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._begun and self.error is None and bool(self._pending or self._sync)

    def _do(self, job: Job | None) -> OSError | None:
        try:
            if job is None:
                self._disk.sync()
            else:
                self._disk.write(job.layer, job.block, [self._memory(slot) for slot in job.slots])
        except OSError as error:
            if not self._warned:
                log.warning("%s: %s; blocks stay in memory while they fit", self._disk.folder, error.strerror or error)
                self._warned = True
            return error
        except Exception as error:  # whoever waits for this thread is told, and doesn't wait for ever
            log.exception("%s: a block can't be written", self._disk.folder)
            return OSError(errno.EIO, str(error))
        return None
