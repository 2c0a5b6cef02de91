"""What the requests of both endpoints have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ktopt.server.errors import ApiError, unsupported

MOST_STOPS = 16
MOST_BIASES = 1024
STOP_CHARACTERS = 256


class Strict(BaseModel):
    """A JSON object that has no other keys than these, and their values of just these types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


Stop = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS)]


class Generation(Strict):
    """How to generate, and how to answer. Of the fields that OpenAI has and that change nothing here, all values are taken."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    n: int | None = Field(None, ge=1, le=1024)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MOST_BIASES)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: str | None = None

    top_k: int | None = Field(None, ge=0, le=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    ignore_eos: bool | None = None

    @model_validator(mode="after")
    def _options_of_streams(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options is only for requests with stream: true", param="stream_options", code="invalid_value"
            )
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def refuse_values(request: BaseModel, reasons: dict[str, tuple[tuple[Any, ...], str]]) -> None:
    """ApiError for a field that was given another value than those that change nothing: reasons[field] = (these, why not)."""
    for name, (harmless, why) in reasons.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise unsupported(name, why)
