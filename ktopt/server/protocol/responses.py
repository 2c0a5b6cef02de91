"""What answers look like, for the OpenAPI description: writers make them as plain JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answered(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorBody(Answered):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Answered):
    error: ErrorBody


class CachedTokens(Answered):
    cached_tokens: int


class Usage(Answered):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopLogprob(Answered):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answered):
    content: list[TokenLogprob]
    refusal: None


class CallFunction(Answered):
    name: str
    arguments: str


class Call(Answered):
    id: str
    type: Literal["function"]
    function: CallFunction


class ChatMessage(Answered):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Call] = []


class ChatChoice(Answered):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answered):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Logprobs(Answered):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Answered):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Answered):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(Answered):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(Answered):
    object: Literal["list"]
    data: list[Model]


class Health(Answered):
    status: Literal["ok", "stopping", "failed"]


class Status(BaseModel):
    """ktopt.engine.status.EngineStatus, with the model, limits and memory of the process."""

    model_config = ConfigDict(extra="allow")
    backend: str
    running: int
    waiting: int
    requests: list[dict[str, Any]]
    memory_bytes: dict[str, int]
    process_bytes: int


class PlanSummary(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str
    devices: dict[str, int]
    operators: dict[str, int]
    steps: list[dict[str, Any]]
    left_out: int
