"""A conversation: what was said, which of it the model still sees, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import KtoptError, UsageError

if TYPE_CHECKING:
    from ktopt.engine.events import Timings, Usage

ROOM_FOR_AN_ANSWER = 32
"""Tokens that the context must have left for an answer, where not fewer are asked for."""

COUNTED_AT_ONCE = 32 << 10
"""Characters."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its answer. `reason` is why the answer ended: "stop", "length" or "cancelled"."""

    question: str
    answer: str
    reason: str
    usage: Usage
    timings: Timings


@dataclass(slots=True)
class Conversation:
    """The turns so far. The model sees those from number `first` on; the others are kept for /save alone."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    first: int = 0

    @property
    def seen(self) -> list[Turn]:
        """The turns that the model sees."""
        return self.turns[self.first :]

    def undo(self) -> Turn | None:
        """Take the last turn back; None where the model sees none."""
        return self.turns.pop() if self.seen else None

    def drop(self, count: int) -> int:
        """Let the model no longer see its oldest `count` turns; how many they were."""
        dropped = min(count, len(self.seen))
        self.first += dropped
        return dropped

    def clear(self) -> None:
        """Begin anew, with the same system message."""
        self.turns, self.first = [], 0


class Template:
    """Makes tokens of a conversation: by the chat template of the model's tokenizer, or, `raw`, by putting the texts one after the
    other. With an `opening` every answer begins with that. UsageError for a model without a template that isn't `raw`."""

    def __init__(self, tokenizer: Any, raw: bool = False, opening: str = "") -> None:
        if not raw and not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                "this model has no chat template, so it knows no messages: --raw continues what you write, as it is, instead"
            )
        self._tokenizer, self.raw, self.opening = tokenizer, raw, opening
        texts = (opening, opening.rstrip()) if opening else ()
        self._openings = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    def ids(self, system: str | None, turns: Sequence[Turn], question: str) -> tuple[int, ...]:
        """The tokens of a prompt that asks `question` after these turns. KtoptError where the template can't have it so."""
        if self.raw:
            text = "".join(turn.question + turn.answer for turn in turns) + question
            return tuple(self._tokenizer(text)["input_ids"])
        messages = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        messages.append({"role": "user", "content": question})
        from jinja2 import TemplateError

        try:
            made = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        except TemplateError as error:
            raise KtoptError(f"the model's chat template refuses this conversation: {error}") from error
        ids = tuple(made["input_ids"])
        for there in self._openings:  # where the template begins answers so itself
            if ids[-len(there) :] == there:
                return ids[: -len(there)] + self._openings[0]
        return ids + self._openings[0] if self._openings else ids

    def count(self, text: str, most: int) -> int:
        """The tokens of a text by itself, or, of one that has more than `most`, a number above that: counting ends there, since
        millions of characters take long. Between the pieces that are counted a token may be two."""
        found = 0
        for start in range(0, len(text), COUNTED_AT_ONCE):
            if found > most:
                break
            piece = text[start : start + COUNTED_AT_ONCE]
            found += len(self._tokenizer(piece, add_special_tokens=False)["input_ids"]) - (start > 0)
        return found


@dataclass(frozen=True, slots=True)
class Full:
    """A prompt that leaves no room for an answer.

    prompt_tokens   what it has
    room_for        tokens of an answer that it should leave room for
    drop            how many of the oldest turns must go so that it fits; None where it doesn't without any
    """

    prompt_tokens: int
    room_for: int
    drop: int | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Tokens: of a prompt and its answer; of a prompt alone, where it may have fewer."""

    context: int
    prompt: int

    def fit(self, prompt: int, answer: int) -> bool:
        return prompt <= self.prompt and prompt + answer <= self.context


def check_room(
    template: Template, conversation: Conversation, question: str, max_tokens: int, bounds: Bounds
) -> tuple[int, ...] | Full:
    """The prompt's tokens, or what is to be done where they leave no room for an answer."""
    least = min(max_tokens, ROOM_FOR_AN_ANSWER)
    seen = conversation.seen
    ids = template.ids(conversation.system, seen, question)
    if bounds.fit(len(ids), least):
        return ids
    wanted = min(max_tokens, bounds.context // 4)  # once turns go, as many as make room for more than this answer
    found = None
    for count in range(1, len(seen) + 1):
        tokens = len(template.ids(conversation.system, seen[count:], question))
        if bounds.fit(tokens, least):
            found = count
        if bounds.fit(tokens, wanted):
            break
    return Full(len(ids), least, found)
