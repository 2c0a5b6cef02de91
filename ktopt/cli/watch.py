"""`ktopt check --watch`: check again whenever a file changes, until Ctrl-C."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ktopt.cli.options import rule_files
from ktopt.diagnostics import KtoptError

if TYPE_CHECKING:
    from ktopt.cli.check import Session

INTERVAL_S = 0.3
Stamp = tuple[int, int] | None


def watch(session: Session, sleep: Callable[[float], None] = time.sleep) -> int:
    """Check, then look every INTERVAL_S whether a file has changed, come or gone: rule files, what they import, settings."""
    try:
        while True:
            before = _stamps(session)
            _once(session)
            seen = {path: before.get(path, stamp) for path, stamp in _stamps(session).items()}
            while _stamps(session) == seen:
                sleep(INTERVAL_S)
    except KeyboardInterrupt:
        print()
        return 0


def _once(session: Session) -> None:
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[2J\x1b[3J\x1b[H")
    session.forget()
    try:
        session.once()
    except KtoptError as error:  # an error that the next change may mend
        from ktopt.cli import complain

        complain(error)
    print("\nWatching for changes; Ctrl-C ends it.")
    sys.stdout.flush()


def _stamps(session: Session) -> dict[str, Stamp]:
    """When each file was last changed, and its size; None for one that isn't there."""
    paths = set(session.read_paths)
    for name in session.args.rules:
        try:
            paths.update(rule_files(name))
        except KtoptError:
            paths.add(name)
    return {path: _stamp(path) for path in paths}


def _stamp(path: str) -> Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
