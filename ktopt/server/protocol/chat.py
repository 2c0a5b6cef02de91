"""The request of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from ktopt.server.protocol.common import Generation, Strict, few_and_right, refuse_values

MOST_MESSAGES = 4096
MOST_PARTS = 1024
MOST_TOOLS = 128
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]


class Part(Strict):
    """A part of a message. Text and refusals are read; the others are refused by the name of their type."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


Content = str | Annotated[list[Part], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)]


class Instructions(Strict):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Strict):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(Strict):
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Strict):
    """An earlier answer. `reasoning_content` is what some servers give back beside the content; templates may use it."""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(min_length=1, max_length=256)
    name: str | None = None


Message = Annotated[Instructions | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class SchemaFormat(Strict):
    """`schema`, and what else OpenAI has around it."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: SchemaFormat


class ChatRequest(Generation):
    """OpenAI's parameters, those of other servers that change how tokens are chosen (top_k, min_p, repetition_penalty, ignore_eos),
    and chat_template_kwargs, which the chat template gets as variables."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: Annotated[TextFormat | ObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)

    metadata: Annotated[dict[str, str] | None, BeforeValidator(few_and_right)] = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    prediction: Any = None
    verbosity: str | None = None
    web_search_options: Any = None

    def check(self) -> None:
        """ApiError for what OpenAI's API has and this server doesn't do."""
        refuse_values(self, _REFUSED)


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "this model gives text alone"),
    "function_call": ((), "is OpenAI's older form; give tool_choice"),
    "functions": ((), "is OpenAI's older form; give tools"),
    "modalities": ((["text"],), "this model gives text alone"),
    "prediction": ((), "this server doesn't take predicted outputs"),
    "verbosity": (("medium",), "no chat template has it; say it in a message"),
    "web_search_options": ((), "this server searches nothing"),
    "store": ((False,), "this server stores nothing"),
    "service_tier": (("auto", "default"), "this server has no tiers"),
    "prompt_cache_retention": (("in-memory", "in_memory"), "the cache keeps what it has room for"),
}
