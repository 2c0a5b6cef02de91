"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from ktopt.engine.request import GrammarSpec, Request
from ktopt.engine.text import THINKING
from ktopt.server.answering import WaitingResponse
from ktopt.server.errors import invalid, unsupported
from ktopt.server.messages import template_messages, template_tools
from ktopt.server.protocol.chat import ChatRequest, JsonSchemaFormat, NamedTool, ObjectFormat, Tool
from ktopt.server.service import Service
from ktopt.server.tools.formats import Format, forced_call
from ktopt.server.writing.chat import ChatWriter

_TAKEN = frozenset((
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "padding",
    "tokenize", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
))  # fmt: skip
"""What apply_chat_template has of its own."""


@dataclass(frozen=True)
class Calling:
    """What tools mean for an answer: those that the template shows, how calls are read, and what is forced."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    form: Format | None = None
    prefix: str = ""
    grammar: GrammarSpec | None = None
    named: bool = False


async def chat(service: Service, request: ChatRequest, client: str) -> WaitingResponse:
    """Answer a chat. ApiError where that can't be done."""
    service.check_model(request.model)
    request.check()
    n = request.n or 1
    service.check_choices(n)
    calling = _calling(service, request)
    options = _template_options(service, request)
    if calling.tools:
        options["tools"] = calling.tools
    messages = template_messages(request, service.prompts.template)
    grammar = calling.grammar or _grammar(request)
    opening = THINKING if service.settings.force_think and grammar is None else ""
    prompt = await service.prompts.of_messages(messages, calling.prefix or opening, **options)
    id = uuid.uuid4().hex
    asked, param = _max_tokens(request)
    made = Request(
        prompt_ids=tuple(prompt),
        max_tokens=service.max_tokens(len(prompt), asked, param),
        sampling=service.sampling(request, _logprobs(request)),
        n=n,
        stop=request.stops,
        ignore_eos=bool(request.ignore_eos),
        keep_special=calling.form is not None and calling.form.special,
        grammar=grammar,
        client=client,
        id=id,
    )
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    writer = ChatWriter(
        service.head(kind, f"chatcmpl-{id}", request),
        n,
        service.bytes_of,
        logprobs=bool(request.logprobs),
        form=calling.form,
        prefix=calling.prefix,
        opening=opening,
        one_call=request.parallel_tool_calls is False,
        named=calling.named,
    )
    params = {"context_length_exceeded": "messages", "invalid_schema": "tools" if calling.grammar else "response_format"}
    return await service.answer([made], writer, params, bool(request.stream))


def _max_tokens(request: ChatRequest) -> tuple[int | None, str]:
    if request.max_completion_tokens is None:
        return request.max_tokens, "max_tokens"
    if request.max_tokens is not None:
        raise invalid("max_tokens", "goes by the name of max_completion_tokens now; give one of them")
    return request.max_completion_tokens, "max_completion_tokens"


def _logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    return (request.top_logprobs or 0) if request.logprobs else None


def _grammar(request: ChatRequest) -> GrammarSpec | None:
    """The grammar of response_format."""
    if isinstance(request.response_format, ObjectFormat):
        return GrammarSpec("json_object")
    if isinstance(request.response_format, JsonSchemaFormat):
        schema = request.response_format.json_schema.schema_
        if schema is None:
            raise invalid("response_format.json_schema.schema", "is missing")
        return GrammarSpec("json_schema", json.dumps(schema))
    return None


def _template_options(service: Service, request: ChatRequest) -> dict[str, Any]:
    """Variables for the chat template. ApiError for those that it doesn't have."""
    source = service.prompts.template.source
    given = dict(request.chat_template_kwargs or {})
    for name in given:
        if name in _TAKEN or not name.isidentifier() or not re.search(rf"\b{name}\b", source):
            raise unsupported("chat_template_kwargs", f"this model's chat template has no variable {name[:80]!r} to give")
    if request.reasoning_effort is not None:
        if not re.search(r"\breasoning_effort\b", source):
            raise unsupported("reasoning_effort", "this model's chat template knows none")
        given["reasoning_effort"] = request.reasoning_effort
    return given


def _calling(service: Service, request: ChatRequest) -> Calling:
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise invalid("tool_choice", "is only allowed when tools are given")
        return Calling()
    if choice == "none":
        return Calling()
    names = [tool.function.name for tool in tools]
    if len({*names}) < len(names):
        raise invalid("tools", "two of them have the same name")
    form = _form(service)
    shown = template_tools(tools)
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported("response_format", "a call of a tool isn't of such a format: give tools or a format")
    if choice in (None, "auto"):
        return Calling(shown, form)
    prefix, grammar = forced_call(form, _required(tools, choice), service.prompts.template.call)
    return Calling(shown, form, prefix, grammar, isinstance(choice, NamedTool))


def _form(service: Service) -> Format:
    template = service.prompts.template
    if not template.tools:
        why = "this model's chat template shows the model no tools" if template.present else "this model has no chat template"
        raise unsupported("tools", why)
    if service.form is None:
        raise unsupported("tools", "this model calls tools in a form that this server doesn't read")
    return service.form


def _required(tools: list[Tool], choice: object) -> list[Tool]:
    if not isinstance(choice, NamedTool):
        return tools
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise invalid("tool_choice", f"no tool has the name {choice.function.name[:80]!r}")
    return named
