"""Where the messages that a person has typed are kept for the next time."""

from __future__ import annotations

import os
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

MOST_BYTES = 1 << 20
"""A longer history is cut to its newer half when a chat begins."""
MOST_CHARACTERS = 32 << 10
"""A longer message isn't kept."""


def state_folder() -> Path:
    """The user's folder for what programs keep between runs, by the XDG base directories."""
    given = os.environ.get("XDG_STATE_HOME", "")
    return Path(given) if given.startswith("/") else Path("~/.local/state").expanduser()


def open_history() -> tuple[History, str]:
    """The history, and why it won't outlive this chat, or ""."""
    path = Path("chat_history")
    try:
        path = state_folder() / "ktopt" / path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        _shorten(path)
    except (OSError, RuntimeError) as error:
        return InMemoryHistory(), f"{path}: {getattr(error, 'strerror', None) or error}; the history ends with this chat"
    return _Kept(path), ""


def _shorten(path: Path) -> None:
    """Entries begin with an empty line and a comment; what is before the first whole one of the newer half goes."""
    if path.stat().st_size <= MOST_BYTES:
        return
    data = path.read_bytes()[-MOST_BYTES // 2 :]
    rest = path.with_suffix(f".{os.getpid()}")
    rest.touch(mode=0o600)
    rest.write_bytes(data[max(0, data.find(b"\n# ")) :])
    rest.replace(path)


class _Kept(FileHistory):
    """A file of messages, none of them huge. What can't be written isn't kept, and that is no reason to end a chat."""

    def store_string(self, string: str) -> None:
        if len(string) > MOST_CHARACTERS:
            return
        try:
            super().store_string(string.encode("utf-8", "replace").decode("utf-8"))
        except OSError:
            return
