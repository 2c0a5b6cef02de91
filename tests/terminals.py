"""A program on a terminal of its own: tests type, and look at what the screen shows."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence

import pyte


class Terminal:
    """`raw` is all that the program has written; `shown` the screen, with what has scrolled off it."""

    def __init__(self, program: Sequence[str], columns: int = 80, rows: int = 24, **environment: str) -> None:
        self.raw, self.columns = b"", columns
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = pyte.ByteStream(self._screen)
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            try:
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
                os.environ.update({"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environment})
                os.execvp(program[0], program)
            finally:
                os._exit(1)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.columns = columns
        self._screen.resize(rows, columns)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, until: Callable[[], bool], limit_s: float = 15) -> None:
        """Take what comes until something holds."""
        end = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < end, f"not within {limit_s} s:\n{self.shown}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                try:
                    data = os.read(self._terminal, 65536)
                except OSError:
                    data = b""
                if not data:
                    assert until(), f"the program ended:\n{self.shown}"
                    return
                self.raw += data
                self._stream.feed(data)

    def wait_for(self, text: str, limit_s: float = 15) -> str:
        self.read(lambda: text in self.shown or text in self.flat, limit_s)
        return self.shown

    @property
    def lines(self) -> list[str]:
        above = ["".join(line[x].data for x in range(self.columns)) for line in self._screen.history.top]
        return [line.rstrip() for line in [*above, *self._screen.display]]

    @property
    def lines_with_text(self) -> list[str]:
        return [line for line in self.lines if line] or [""]

    @property
    def shown(self) -> str:
        return "\n".join(self.lines).rstrip()

    @property
    def flat(self) -> str:
        """The same in one line, as if none had been broken between words."""
        return " ".join(self.shown.split())

    @property
    def screen(self) -> str:
        """What isn't scrolled off."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def end(self, limit_s: float = 15) -> int:
        """The exit code, once the program has ended."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if select.select([self._terminal], [], [], 0.05)[0]:
                try:
                    data = os.read(self._terminal, 65536)
                    self.raw += data
                    self._stream.feed(data)
                except OSError:
                    pass
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"still running:\n{self.shown}")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)
