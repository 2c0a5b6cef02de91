"""A chat: a conversation that goes on, over an engine and on a screen; what its commands do is in commands.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ktopt.chat.answering import answer
from ktopt.chat.attachments import MOST_BYTES, Attachment, with_files
from ktopt.chat.conversation import Bounds, Conversation, Full, Template, check_room
from ktopt.chat.measures import context_used, summary
from ktopt.chat.screen import Screen
from ktopt.diagnostics import KtoptError
from ktopt.engine.request import Request, Sampling
from ktopt.render.style import plural

if TYPE_CHECKING:
    from ktopt.engine.engine import Engine


class Stopped(KtoptError):
    """Ctrl-C came before the first word of an answer."""


@dataclass(slots=True)
class Chat:
    """What a chat consists of.

    model               its name, for people
    max_tokens          of an answer
    memory_bytes        what the process holds for the model now
    tiers               a table of the cache's tiers, where it has some
    most_prompt_tokens  of a prompt, where the context holds more
    confirm             asks whether to do something; None where nobody can be asked
    files               what /file has added to the next message
    """

    engine: Engine
    template: Template
    conversation: Conversation
    screen: Screen
    model: str
    max_tokens: int
    sampling: Sampling
    memory_bytes: Callable[[], int]
    tiers: Callable[[], str] | None = None
    most_prompt_tokens: int | None = None
    confirm: Callable[[str], bool] | None = None
    files: list[Attachment] = field(default_factory=list)
    asked: int = 0

    def say(self, text: str) -> None:
        """Ask the model, with the files that were added, and show its answer. KtoptError where it can't be asked: nothing of the
        conversation or the files is lost then."""
        question = with_files(text, self.files)
        if (size := len(question.encode())) > MOST_BYTES:
            raise KtoptError(f"the message has {size:,} bytes, and may have {MOST_BYTES:,}")
        most = self.most_prompt_tokens or self.engine.context_tokens
        if (tokens := self.template.count(question, most)) > most:
            raise KtoptError(f"the message has at least {tokens:,} tokens; the context holds {most:,}: shorten it")
        self._ask(question)
        self.files.clear()

    def retry(self) -> None:
        """Ask the last message again, in the place of its answer. KtoptError where there is none."""
        turn = self.conversation.undo()
        if turn is None:
            raise KtoptError("there is no message to ask again")
        before = len(self.conversation.turns)
        try:
            self._ask(turn.question)
        finally:
            if len(self.conversation.turns) == before:
                self.conversation.turns.append(turn)

    def _ask(self, question: str) -> None:
        ids = self._fitting(question)
        max_tokens = min(self.max_tokens, self.engine.context_tokens - len(ids))
        sampling = self.sampling
        if sampling.seed is not None:  # each answer its own, so that /retry gives another
            sampling = replace(sampling, seed=(sampling.seed + self.asked) % (1 << 64))
        request = Request(prompt_ids=ids, max_tokens=max_tokens, sampling=sampling, client="chat")
        self.screen.gap()
        turn = answer(self.engine, request, question, self.screen.display(), self.template.opening)
        self.screen.gap()
        self.asked += 1
        for remark in self.screen.remarks.taken():
            self.screen.note(remark)
        if not turn.answer and turn.reason == "cancelled":
            raise Stopped("stopped before the answer began; the message isn't part of the conversation")
        self.conversation.turns.append(turn)
        if turn.reason == "cancelled":
            self.screen.note("(stopped)")
        elif turn.reason == "length":
            self.screen.note(self._cut_off(max_tokens))
        self.screen.note(summary(turn, self.engine.context_tokens, self.memory_bytes()))
        if context_used(turn) >= self.engine.context_tokens - 1:
            self.screen.note("the context is full: /drop lets the model forget the oldest turns, /clear all of them")

    def _cut_off(self, max_tokens: int) -> str:
        why = "which -n asks for" if max_tokens == self.max_tokens else "for which the context had room"
        return f"(cut off after {plural(max_tokens, 'token')}, {why})"

    def _fitting(self, question: str) -> tuple[int, ...]:
        """The prompt's tokens. Where they leave no room for an answer, the oldest turns go if that is wanted, or KtoptError."""
        talk, context_tokens = self.conversation, self.engine.context_tokens
        bounds = Bounds(context_tokens, self.most_prompt_tokens or context_tokens)
        found = check_room(self.template, talk, question, self.max_tokens, bounds)
        if not isinstance(found, Full):
            return found
        holds = f"the context holds {context_tokens:,}, of which an answer needs {found.room_for}"
        if self.most_prompt_tokens is not None:
            holds = f"a prompt may have {self.most_prompt_tokens:,} (max_seq_len)"
        what = f"with this message the conversation has {found.prompt_tokens:,} tokens, and {holds}"
        if found.drop is None:
            raise KtoptError(f"{what}. The message alone is too long: shorten it")
        oldest = f"the oldest {plural(found.drop, 'turn')} of {len(talk.seen)}"
        if self.confirm is not None:
            self.screen.say(f"{what}. /save keeps what the model forgets.")
        if self.confirm is None or not self.confirm(f"Shall it forget {oldest}?"):
            raise KtoptError(f"{what}. /drop {found.drop} lets the model forget {oldest}, /clear all of them")
        talk.drop(found.drop)
        return self._fitting(question)
