"""The messages of a chat request as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ktopt.server.errors import ApiError, invalid, unsupported
from ktopt.server.protocol.chat import AssistantMessage, ChatRequest, Message, Part, Tool, ToolCall, ToolMessage
from ktopt.server.template import Template


def template_messages(request: ChatRequest, template: Template) -> list[dict[str, Any]]:
    """Messages as dictionaries: text alone, "developer" as "system", calls' arguments in the form that the template wants."""
    return [_message(message, f"messages[{place}]", template) for place, message in enumerate(request.messages)]


def _message(message: Message, where: str, template: Template) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": text_of(message.content, f"{where}.content")}
    if message.name is not None:
        made["name"] = message.name
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.audio is not None or message.function_call is not None:
            named = "audio" if message.audio is not None else "function_call"
            raise unsupported(f"{where}.{named}", "isn't taken by this server")
        if message.content is None and not message.tool_calls and message.refusal is None:
            raise invalid(f"{where}.content", "an answer without tool_calls has some")
        if message.reasoning_content is not None:
            made["reasoning_content"] = message.reasoning_content
        if message.refusal is not None and message.content is None:
            made["content"] = message.refusal
        if message.tool_calls:
            calls = enumerate(message.tool_calls)
            made["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]", template) for place, call in calls]
    return made


def text_of(content: str | list[Part] | None, where: str) -> str:
    """The text of a message, its parts on lines of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: Part, where: str) -> str:
    if part.type not in ("text", "refusal"):
        message = f"{where}: this model reads text alone, and this part is of type {part.type!r}"
        raise ApiError(400, message, param=where, code="unsupported_content")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise invalid(f"{where}.{part.type}", "is missing")
    return text


def _call(call: ToolCall, where: str, template: Template) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if not template.arguments_text:
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise invalid(f"{where}.function.arguments", "isn't JSON") from None
        if not isinstance(arguments, dict):
            raise invalid(f"{where}.function.arguments", "isn't a JSON object")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates show them to the model."""
    shown = []
    for tool in tools:
        function = {"name": tool.function.name, "description": tool.function.description or ""}
        parameters = tool.function.parameters or {"type": "object", "properties": {}}
        shown.append({"type": "function", "function": {**function, "parameters": parameters}})
    return shown
