"""What a server allows and how long it waits, and the model that it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktopt.plan import Plan

DEFAULT_PORT = 10002
"""KTransformers' own."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """How tokens are chosen where a request doesn't say; None leaves it to the model's generation config."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The limits of a server.

    api_key             what requests must bring as a bearer token; None asks for none
    any_model           take requests for whatever model name, as KTransformers does
    force_think         answers to chats begin with THINKING, where they aren't constrained
    max_new_tokens      new tokens of a request at most, and where it doesn't say
    max_prompt_tokens   of a prompt at most; None leaves the model's context as the bound
    max_body_bytes      of a request
    max_choices         `n`, times the prompts of a completion
    max_streams         requests being answered or waiting at the same time
    body_timeout_s, template_timeout_s   for a request to arrive, and for its prompt to be made
    write_timeout_s     how long a reader may leave what it was sent unread before its request is cancelled
    max_unread_bytes    how much may wait for it meanwhile
    keepalive_s         between comments in a stream that has nothing else to say
    drain_s             for what runs to end, when the server is told to stop
    allowed_hosts       Host headers taken beside addresses, localhost and this machine's name; "*" takes all
    allowed_origins     web pages of other origins that may call the API; "*" for all
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = None
    any_model: bool = False
    force_think: bool = False
    max_new_tokens: int = 2000
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 8 << 20
    max_choices: int = 16
    max_streams: int = 256
    body_timeout_s: float = 30.0
    template_timeout_s: float = 20.0
    write_timeout_s: float = 30.0
    max_unread_bytes: int = 1 << 20
    keepalive_s: float = 15.0
    drain_s: float = 30.0
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    sampled: Sampled = field(default_factory=Sampled)


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model behind a server: the names that requests may give it, the first of them in answers; the plan that it runs by; when
    it was loaded (seconds since 1970); bytes of its weights by device."""

    names: tuple[str, ...]
    plan: Plan | None = None
    created: int = 0
    weight_bytes: dict[str, int] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]
