"""Files whose text goes into a message."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ktopt.diagnostics import UsageError

MOST_BYTES = 4 << 20
"""Of a file, and of a message as a whole."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file's name and text."""

    name: str
    text: str


def read_text(path: str, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file. UsageError for what isn't there, isn't a file, is larger than `most_bytes`, or isn't UTF-8."""
    place = Path(os.path.expanduser(path))  # ~ of somebody who isn't there stays as it is
    try:
        with open(place, "rb", opener=_without_waiting) as file:
            kind = os.fstat(file.fileno())
            if not stat.S_ISREG(kind.st_mode):
                raise UsageError(f"{path}: not a file with a text, but a device or a pipe")
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > most_bytes:
        raise UsageError(f"{path}: {kind.st_size:,} bytes, and a message may have {most_bytes:,}")
    if not data.strip():
        raise UsageError(f"{path}: there is nothing in it")
    if (at := data.find(b"\0")) >= 0:
        raise UsageError(f"{path}: not a text: byte {at:,} is 0")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: byte {error.start:,} is 0x{data[error.start]:02x}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe, too, of which nothing comes."""
    return os.open(path, flags | os.O_NONBLOCK)


def with_files(question: str, files: list[Attachment]) -> str:
    """A message with the files that go before it, each in a fence that is longer than any within."""
    return "\n\n".join([*(f"{file.name}:\n\n{_fenced(file.text)}" for file in files), question])


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.rstrip()}\n{fence}"
