"""A model's chat template: messages to the tokens of a prompt, and what can be known of a template by trying it.

Rendering and tokenizing take time that grows with a request, so they run in threads of their own (`Prompts`), for a bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ktopt.server.errors import ApiError, invalid

PROBE = "probe_of_tools"
_ARGUMENT = "probe_of_arguments"
_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {_ARGUMENT: {"type": "string"}}, "required": [_ARGUMENT]},
    },
}
_QUESTION = {"role": "user", "content": "probe"}
THREADS = 2

PIECE_CHARACTERS = 64 << 10
"""Of a text of more than that, tokens are counted piece by piece."""
CUT_TOKENS = 16
"""More than there are in place of others where a piece begins or ends within one."""

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Template:
    """What a tokenizer's chat template has.

    present          whether there is one
    tools            whether it shows tools to the model
    call             what it makes of an assistant's call of the tool PROBE, by which the model's own form of calls is known; ""
                     where it makes nothing of it
    arguments_text   whether it wants a call's arguments as JSON text instead of values
    source           its text
    """

    present: bool = False
    tools: bool = False
    call: str = ""
    arguments_text: bool = False
    source: str = ""


def learn(tokenizer: Any) -> Template:
    """Try what the chat template of a tokenizer does."""
    source = _source(tokenizer)
    if not source:
        return Template()
    shown = _tried(tokenizer, [_QUESTION], tools=[_TOOL])
    if not shown or PROBE not in shown:
        return Template(present=True, source=source)
    for arguments_text in (False, True):
        for content in ("", None):
            call = _tried(tokenizer, [_QUESTION, _call(arguments_text, content)], tools=[_TOOL], add_generation_prompt=False)
            if call and _ARGUMENT in (made := call.removeprefix(_common(shown, call))) and PROBE in made:
                return Template(present=True, tools=True, call=made, arguments_text=arguments_text, source=source)
    return Template(present=True, tools=True, source=source)


def _source(tokenizer: Any) -> str:
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):
        return str(found.get("default", ""))
    return str(found or "")


def _call(arguments_text: bool, content: str | None) -> dict[str, Any]:
    arguments = f'{{"{_ARGUMENT}": "x"}}' if arguments_text else {_ARGUMENT: "x"}
    call = {"id": "call00000", "type": "function", "function": {"name": PROBE, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _common(one: str, other: str) -> str:
    count = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:count]


def _tried(tokenizer: Any, messages: Messages, **options: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, **{"tokenize": False, "add_generation_prompt": True, **options}))
    except Exception:
        return ""


class Prompts:
    """Makes prompts in threads of its own: those of one server. Texts of more than `most_tokens` tokens are refused before all of
    them is read, so that they hold up nobody."""

    def __init__(self, tokenizer: Any, timeout_s: float, most_tokens: int) -> None:
        self.tokenizer, self.timeout_s, self.most_tokens = tokenizer, timeout_s, most_tokens
        self.template = learn(tokenizer)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="prompts")

    async def of_messages(self, messages: Messages, suffix: str = "", **options: Any) -> list[int]:
        """Tokens of messages, and of `suffix`, with which an answer begins, by the template or else by this. ApiError where the
        template doesn't take them."""
        return await self._run(lambda: self._render(messages, suffix, options))

    async def of_text(self, text: str) -> list[int]:
        """Tokens of a text, with those that the tokenizer begins one with."""
        return await self._run(lambda: self._ids(text))

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""
        return await self._run(lambda: str(self.tokenizer.decode(token_ids)))

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TimeoutError:
            message = f"making the prompt took longer than {self.timeout_s:g} s: shorten it"
            raise ApiError(400, message, code="prompt_too_slow") from None

    def _render(self, messages: Messages, suffix: str, options: dict[str, Any]) -> list[int]:
        if not self.template.present:
            raise ApiError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
        from jinja2.exceptions import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            raise invalid("messages", f"the model's chat template doesn't take them: {str(error)[:200]}") from None
        if suffix and text.rstrip().endswith(suffix.rstrip()):
            text = text.rstrip().removesuffix(suffix.rstrip())
        return self._ids(text + suffix, add_special_tokens=False)

    def _ids(self, text: str, **options: Any) -> list[int]:
        found = 0
        for place in range(0, len(text) - PIECE_CHARACTERS, PIECE_CHARACTERS):
            piece = text[place : place + PIECE_CHARACTERS]
            found += len(self.tokenizer(piece, add_special_tokens=False)["input_ids"]) - CUT_TOKENS
            if found > self.most_tokens:
                message = f"the prompt has more than {found} tokens, and it may have {self.most_tokens} here: shorten it"
                raise ApiError(400, message, code="context_length_exceeded")
        return list(self.tokenizer(text, **options)["input_ids"])

    def close(self) -> None:
        """End the threads, without waiting for what they still do."""
        self._pool.shutdown(wait=False, cancel_futures=True)
