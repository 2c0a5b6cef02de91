"""`ktopt chat`: apply a rule file and talk with the model, in a terminal or through pipes."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.cli.loading import Loaded, add_force_think, add_generation, add_what_runs, check_generation, load
from ktopt.cli.terminal import style_of
from ktopt.diagnostics import UsageError
from ktopt.plan_options import LONG_CONTEXT
from ktopt.render.style import plural
from ktopt.runtime.memory import resident_bytes, return_large_blocks
from ktopt.runtime.threads import calm_openmp, parse_threads

if TYPE_CHECKING:
    from ktopt.chat.chatting import Chat


TURNS_TOKENS = 4096
"""Of earlier turns and questions, that `place: auto` makes room for beside an answer."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_what_runs(parser)
    parser.add_argument(
        "--prompt_file", "--prompt-file", dest="prompt_file", metavar="F", help="the first message: the text of a file"
    )
    add_generation(parser, max_tokens=1024)
    add_force_think(parser)
    parser.add_argument("--quiet", "-q", action="store_true", help="leave out what each answer took")


def run(args: argparse.Namespace) -> int:
    from ktopt.chat.attachments import read_text

    calm_openmp()
    return_large_blocks()
    threads = parse_threads(args.threads, args.affinity)
    threads.stay_on_cores()
    check_generation(args)
    if args.raw and args.system:
        raise UsageError("--system needs a chat template, which --raw leaves out")
    if args.raw and args.force_think:
        raise UsageError("--force_think begins answers after a chat template, which --raw leaves out")
    first = [read_text(args.prompt_file)] if args.prompt_file is not None else []
    interactive = sys.stdin.isatty()
    if not interactive:
        first += _piped()
        if not first:
            raise UsageError("nothing is asked: standard input is empty, and there is no --prompt_file")
    args.room = TURNS_TOKENS + args.max_tokens
    loaded = load(args, threads)
    chat, engine = _chat(args, loaded)
    with closing(engine):
        if interactive:
            _talk(chat, first)
        else:
            for message in first:
                _answer(chat, message)
    return 0


def _piped() -> list[str]:
    """The message that comes through standard input; none where that is empty."""
    from ktopt.chat.attachments import MOST_BYTES
    from ktopt.chat.safety import typed

    try:
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
        text = typed(data.decode("utf-8")).strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input isn't UTF-8 text: byte {error.start:,} is 0x{data[error.start]:02x}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"standard input has more than {MOST_BYTES:,} bytes, which is what a message may have")
    return [text] if text else []


def _chat(args: argparse.Namespace, loaded: Loaded) -> tuple[Chat, Any]:
    from ktopt.chat.chatting import Chat
    from ktopt.chat.conversation import Conversation, Template
    from ktopt.chat.screen import Screen
    from ktopt.engine.single import SingleEngine
    from ktopt.engine.text import THINKING

    template = Template(loaded.tokenizer, args.raw, THINKING if args.force_think else "")
    conversation = Conversation(args.system)
    template.ids(args.system, [], "hello")  # a template that takes no system message says so now
    if args.mode == LONG_CONTEXT:
        from ktopt.cli.long_run import tiers
        from ktopt.long_context.session import LongContextSession

        session = LongContextSession(loaded.model, loaded.tokenizer, weights=loaded.weights)
        engine, table, most = SingleEngine.over_session(session), partial(tiers, session), int(session.settings.max_seq_len)
    else:
        engine, table, most = SingleEngine(loaded.model, loaded.tokenizer), None, None
    chat = Chat(
        engine,
        template,
        conversation,
        Screen(style_of(sys.stdout), args.quiet),
        model=Path(loaded.name).name,
        max_tokens=args.max_tokens,
        sampling=sampling(args),
        memory_bytes=lambda: max(0, resident_bytes() - loaded.baseline_bytes),
        tiers=table,
        most_prompt_tokens=most,
    )
    logging.getLogger("ktopt").addHandler(chat.screen.remarks)
    return chat, engine


def sampling(args: argparse.Namespace) -> Any:
    """How tokens are chosen, as an engine takes it. Without any of its arguments, the model's own generation config decides."""
    from ktopt.engine.request import Sampling

    return Sampling(temperature=0.0 if args.greedy else args.temperature, seed=args.seed)


def _talk(chat: Chat, first: list[str]) -> None:
    from ktopt.chat.commands import COMMANDS
    from ktopt.chat.history import open_history
    from ktopt.chat.line import TypingLine, keys_wait
    from ktopt.chat.loop import one_line, run
    from ktopt.chat.measures import of_context

    history, lost = open_history()
    line = TypingLine(history, {name: command.does for name, command in COMMANDS.items()})
    chat.confirm = line.confirm
    chat.screen.note(f"{chat.model}; context {of_context(0, chat.engine.context_tokens)}. /help lists the commands; Ctrl-D leaves")
    if lost:
        chat.screen.note(lost)
    start = ""
    with keys_wait():
        for message in first:
            chat.screen.note(f"\n> {plural(len(message), 'character')} of a file")
            start = one_line(chat, f" {message}")
        run(chat, line, start)


def _answer(chat: Chat, message: str) -> None:
    """Answer where nobody types. KeyboardInterrupt where Ctrl-C stopped it."""
    from ktopt.chat.chatting import Stopped

    try:
        chat.say(message)
    except Stopped:
        raise KeyboardInterrupt from None
    if chat.conversation.turns[-1].reason == "cancelled":
        raise KeyboardInterrupt
