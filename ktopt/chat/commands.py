"""What begins with a slash: the commands of a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ktopt.chat.attachments import MOST_BYTES, Attachment, read_text
from ktopt.chat.chatting import Chat
from ktopt.chat.measures import statistics
from ktopt.chat.saving import save
from ktopt.diagnostics import KtoptError
from ktopt.operator import nearest
from ktopt.render.style import plural

MOST_DIGITS = 9
"""Of a number of turns."""


class Leave(Exception):
    """The chat is over."""


class Command(NamedTuple):
    """A command: what follows its name, what it does, and the function that does it. That gets what was written after the name, and
    answers what the next message begins with."""

    takes: str
    does: str
    run: Callable[[Chat, str], str]


def run_command(chat: Chat, line: str) -> str:
    """Carry out a line that begins with a slash; what the next message begins with. KtoptError for what can't be done, Leave where
    the chat is over."""
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(name.rstrip())
    if command is None:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else f"commands are {', '.join(COMMANDS)}."
        raise KtoptError(f"no command {name}: {hint} A message that begins with a slash needs a blank before it")
    rest = rest.strip()
    if rest and not command.takes:
        raise KtoptError(f"{name} takes nothing after it")
    if not rest and command.takes and not command.takes.startswith("["):
        raise KtoptError(f"{name} {command.takes}: {command.takes} is missing")
    return command.run(chat, rest)


def _help(chat: Chat, _: str) -> str:
    rows = [*((f"{name} {command.takes}", command.does) for name, command in COMMANDS.items()), ("", ""), *KEYS.items()]
    wide = max(len(what) for what, _ in rows) + 2
    lines = [f"{what:<{wide}}{does}" for what, does in rows]
    chat.screen.say("\n".join(lines))
    return ""


def _system(chat: Chat, text: str) -> str:
    if not text:
        chat.screen.say(chat.conversation.system or "there is no system message")
        return ""
    if chat.template.raw:
        raise KtoptError("a system message needs a chat template, which --raw leaves out")
    before, chat.conversation.system = chat.conversation.system, None if text == "-" else text
    try:
        chat.template.ids(chat.conversation.system, [], "hello")
    except KtoptError:
        chat.conversation.system = before
        raise
    chat.screen.note("the system message is gone" if text == "-" else "the system message holds from the next message on")
    return ""


def _file(chat: Chat, path: str) -> str:
    if len(path) > 1 and path[0] == path[-1] and path[0] in "'\"":
        path = path[1:-1]
    text = read_text(path, MOST_BYTES - sum(len(file.text.encode()) for file in chat.files))
    most = chat.most_prompt_tokens or chat.engine.context_tokens
    if (tokens := chat.template.count(text, most)) >= most:
        raise KtoptError(f"{path}: at least {tokens:,} tokens, and the context holds {most:,}")
    chat.files.append(Attachment(path, text))
    chat.screen.note(f"{path}, {plural(tokens, 'token')}, goes with the next message")
    return ""


def _stats(chat: Chat, _: str) -> str:
    chat.screen.say(statistics(chat.conversation, chat.engine, chat.memory_bytes(), chat.tiers))
    return ""


def _save(chat: Chat, path: str) -> str:
    if not chat.conversation.turns:
        raise KtoptError("there is nothing to save yet")
    try:
        place = save(chat.conversation, chat.model, path)
    except FileExistsError:
        if chat.confirm is None or not chat.confirm(f"{path} exists. Overwrite it?"):
            raise KtoptError(f"{path} exists, and stays as it is: choose another name") from None
        place = save(chat.conversation, chat.model, path, overwrite=True)
    chat.screen.note(f"wrote {place}: {plural(len(chat.conversation.turns), 'turn')}")
    return ""


def _clear(chat: Chat, _: str) -> str:
    chat.conversation.clear()
    chat.files.clear()
    chat.screen.note("a new conversation" + (", with the same system message" if chat.conversation.system else ""))
    return ""


def _undo(chat: Chat, _: str) -> str:
    turn = chat.conversation.undo()
    if turn is None:
        raise KtoptError("there is no turn to take back")
    chat.screen.note("the last message and its answer are taken back")
    return turn.question


def _retry(chat: Chat, _: str) -> str:
    chat.retry()
    return ""


def _drop(chat: Chat, text: str) -> str:
    if not (text or "1").isdecimal() or len(text) > MOST_DIGITS or not (count := int(text or "1")):
        raise KtoptError(f"/drop [N]: a number of turns from 1 on, not {text[:40]}")
    dropped = chat.conversation.drop(count)
    if not dropped:
        raise KtoptError("the model sees no turns that it could forget")
    left = plural(len(chat.conversation.seen), "turn")
    chat.screen.note(f"the model forgets the oldest {plural(dropped, 'turn')}, and sees {left}; /save keeps all")
    return ""


def _quit(chat: Chat, _: str) -> str:
    raise Leave


COMMANDS = {
    "/help": Command("", "show this", _help),
    "/system": Command("[TEXT]", "set the system message, from the next message on; - takes it away, nothing shows it", _system),
    "/file": Command("PATH", "add a file's text to the next message; several add up", _file),
    "/stats": Command("", "tokens, speed and memory so far, and the cache's tiers", _stats),
    "/save": Command("PATH", "write the conversation to PATH, as Markdown (.md) or JSON (.json)", _save),
    "/clear": Command("", "begin a new conversation", _clear),
    "/undo": Command("", "take the last message and its answer back, to write it anew", _undo),
    "/retry": Command("", "ask the last message again", _retry),
    "/drop": Command("[N]", "let the model forget the oldest N turns, one if no number is given", _drop),
    "/quit": Command("", "leave", _quit),
}
KEYS = {
    "Alt-Enter, \\ Enter": "a new line; pasted text keeps its lines",
    "Up, Down, Ctrl-R": "earlier messages; those that begin as yours does; search",
    "Ctrl-X Ctrl-E": "write the message in $EDITOR",
    "Ctrl-C": "stop the answer; clear the line; twice on an empty one: leave",
    "Ctrl-D": "leave",
}
