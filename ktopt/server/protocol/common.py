"""What the requests of both endpoints have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ktopt.server.errors import ApiError, unsupported

MOST_STOPS = 16
STOP_CHARACTERS = 256


MOST_KEYS = 128
"""More than any object here has fields."""
MOST_NAMED = 1024
"""Keys of an object that may have whatever keys."""


def few_and_right(given: Any) -> Any:
    """Refuses an object of too many keys before its values are looked at, each of which may be wrong."""
    if isinstance(given, dict) and len(given) > MOST_NAMED:
        raise PydanticCustomError("too_long", f"has {len(given):,} keys, and there may be {MOST_NAMED:,}")  # type: ignore[misc]
    return given


class Strict(BaseModel):
    """A JSON object that has no other keys than these, and their values of just these types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_key(cls, given: Any) -> Any:
        """An object of a million keys has at least one that is unknown: that one is enough to refuse, and costs no time."""
        if not isinstance(given, dict) or len(given) <= MOST_KEYS:
            return given
        known = {name for key, field in cls.model_fields.items() for name in (key, field.alias) if name}
        unknown = next(key for key in given if key not in known)
        return {unknown: None} | {key: given[key] for key in known & given.keys()}


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
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(few_and_right)] = Field(
        None, max_length=MOST_NAMED
    )
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
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
