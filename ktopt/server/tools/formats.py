"""The forms in which models write calls of tools. A model's form is the one that reads what its chat template makes of a call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktopt.engine.request import GrammarSpec
from ktopt.server.errors import unsupported
from ktopt.server.protocol.chat import Tool

_NAME = r'"((?:[^"\\]|\\.)*)"'


@dataclass(frozen=True)
class Format:
    """A form of calls.

    opens      a call, or the first of several, begins with it; "" where one begins with the answer's first "{"
    dropped    what else is no content
    header     what comes between that and the arguments, which are a JSON object; its first group with a match is the tool's name
    closes     what ends a call
    repeats    whether calls follow each other without `opens`, as in a JSON array
    arguments  the name that a call's JSON has for them; "" where a call isn't one JSON object
    special    whether `opens` is a special token, which engines leave out of texts unless told otherwise
    """

    name: str
    opens: str
    header: re.Pattern[str]
    closes: str
    dropped: tuple[str, ...] = ()
    repeats: bool = False
    arguments: str = "arguments"
    special: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (*((self.opens,) if self.opens else ()), *self.dropped)


HERMES = Format(
    name="hermes",
    opens="<tool_call>",
    header=re.compile(rf'\s*\{{\s*"name"\s*:\s*{_NAME}\s*,\s*"arguments"\s*:\s*(?=\{{)'),
    closes="</tool_call>",
)
LLAMA = Format(
    name="llama",
    opens="",
    header=re.compile(
        rf'\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*{_NAME}\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\{{)'
    ),
    closes="}",
    dropped=("<|python_tag|>",),
    repeats=True,
    arguments="parameters",
    special=True,
)
MISTRAL = Format(
    name="mistral",
    opens="[TOOL_CALLS]",
    header=re.compile(rf'\s*\[?\s*\{{\s*"name"\s*:\s*{_NAME}\s*,\s*"arguments"\s*:\s*(?=\{{)'),
    closes="}",
    repeats=True,
    special=True,
)
MISTRAL_ARGS = Format(
    name="mistral with [ARGS]",
    opens="[TOOL_CALLS]",
    header=re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\s*\w+)?\[ARGS\]\s*(?=\{)"),
    closes="",
    arguments="",
    special=True,
)
DEEPSEEK = Format(
    name="deepseek",
    opens="<｜tool▁call▁begin｜>",
    header=re.compile(r"\s*(?:function<｜tool▁sep｜>\s*([^\s<]+)\s*```json\s*|([^\s<]+)<｜tool▁sep｜>\s*)(?=\{)"),
    closes="<｜tool▁call▁end｜>",
    dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    arguments="",
    special=True,
)
FORMATS = (HERMES, MISTRAL, MISTRAL_ARGS, DEEPSEEK, LLAMA)


def forced_call(form: Format, tools: Sequence[Tool], shown: str) -> tuple[str, GrammarSpec]:
    """How an answer begins that is a call of one of these tools, and the grammar of the rest. `shown` is what the chat template
    makes of a call. ApiError where a form has no such grammar."""
    if form.arguments:
        calls = [_call_schema(tool, form.arguments) for tool in tools]
        schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if form is MISTRAL:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
        return form.opens + "\n" * (form is HERMES), GrammarSpec("json_schema", json.dumps(schema))
    if len(tools) != 1:
        raise unsupported("tool_choice", "for this model's form of calls, name the tool: one of several can't be required")
    name = tools[0].function.name
    if form is MISTRAL_ARGS:
        prefix = f"[TOOL_CALLS]{name}[ARGS]"
    elif "function<｜tool▁sep｜>" in shown:
        prefix = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
    else:
        prefix = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
    return prefix, GrammarSpec("json_schema", json.dumps(parameters_of(tools[0])))


def _call_schema(tool: Tool, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, arguments: parameters_of(tool)},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    return {"type": "object", **(tool.function.parameters or {"properties": {}, "additionalProperties": False})}
