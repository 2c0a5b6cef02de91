"""Where messages are typed: lines that can be edited, with history, search and completion (prompt_toolkit)."""

from __future__ import annotations

import signal
import sys
import termios
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from ktopt.chat.safety import typed

WITH_PATHS = ("/file ", "/save ")


class TypingLine:
    """Reads messages from a terminal. `commands` are completed, with what they do beside them."""

    def __init__(self, history: History, commands: Mapping[str, str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=history,
            completer=_Completer(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else ". ".rjust(width),
            enable_history_search=True,
            enable_open_in_editor=True,
            enable_suspend=True,
            output=create_output(always_prefer_tty=True),
        )

    def ask(self, prompt: str, default: str = "") -> str:
        """What is typed. KeyboardInterrupt for Ctrl-C on an empty line, EOFError for Ctrl-D there."""
        return typed(self._session.prompt(prompt, default=default))

    def confirm(self, question: str) -> bool:
        """Whether the answer to a question is yes. Ctrl-C and Ctrl-D mean no."""
        asked: PromptSession[str] = PromptSession(output=create_output(always_prefer_tty=True))
        try:
            return asked.prompt(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except (KeyboardInterrupt, EOFError):
            return False


def _keys() -> KeyBindings:
    keys, here = KeyBindings(), has_focus(DEFAULT_BUFFER)  # while searching, keys have other meanings

    @keys.add("enter", filter=here)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end_of_line:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=here)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=here)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

    return keys


class _Completer(Completer):
    """The names of commands, and paths after those that take one."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands, self._paths = commands, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        for command in WITH_PATHS:
            if text.startswith(command):
                path = text[len(command) :].lstrip()
                yield from self._paths.get_completions(Document(path), complete_event)
                return
        if text.startswith("/") and not set(text) & set(" \n"):
            for name, does in self._commands.items():
                if name.startswith(text):
                    yield Completion(name, start_position=-len(text), display_meta=does)


@contextmanager
def keys_wait() -> Iterator[None]:
    """While this lasts, keys that are pressed between prompts don't show among what is written, and the next prompt reads them as
    they are. Ctrl-C interrupts as always. SIGTERM and SIGHUP end the program by SystemExit, so that all who changed the terminal
    put it back."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    waiting = [before[0] & ~termios.ICRNL, *before[1:3], before[3] & ~(termios.ECHO | termios.ICANON), *before[4:]]
    termios.tcsetattr(terminal, termios.TCSADRAIN, waiting)
    handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)
