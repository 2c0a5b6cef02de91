"""The loop of a chat on a terminal: a message or a command, what comes of it, the next."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from ktopt.chat.chatting import Chat
from ktopt.chat.commands import Leave, run_command
from ktopt.chat.history import MOST_CHARACTERS
from ktopt.chat.line import TypingLine
from ktopt.diagnostics import KtoptError
from ktopt.render.style import plural


def run(chat: Chat, line: TypingLine, start: str = "") -> None:
    """Until /quit, Ctrl-D, or Ctrl-C twice on an empty line. The first message begins with `start`."""
    leaving = False
    with _interrupts_noted() as noted:
        while True:
            chat.screen.gap()
            try:
                if leaving and noted:
                    return
                text = line.ask(_prompt(chat), start)
            except EOFError:
                return
            except KeyboardInterrupt:
                if leaving:
                    return
                leaving = True
                noted.clear()
                chat.screen.note("Ctrl-C again leaves")
                continue
            leaving = False
            try:
                start = one_line(chat, text)
            except Leave:
                return


@contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """While this lasts, Ctrl-C between answers and prompts, which have ways of their own, is put into a list and does nothing."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def one_line(chat: Chat, text: str) -> str:
    """Do what a message or a command asks; what the next one begins with: what couldn't be sent isn't lost."""
    if not text.strip():
        return ""
    try:
        if text.startswith("/"):
            return run_command(chat, text)
        chat.say(text.strip())
    except KtoptError as error:
        chat.screen.error(error)
        return "" if text.startswith("/") or len(text) > MOST_CHARACTERS else text
    return ""


def _prompt(chat: Chat) -> str:
    return f"({plural(len(chat.files), 'file')}) > " if chat.files else "> "
