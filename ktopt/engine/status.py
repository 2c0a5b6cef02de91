"""What an engine is doing: numbers for a status page, a chat's /stats and for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A request that waits or runs. `new_tokens` are those of all choices; `age_s` is since submit."""

    id: str
    client: str
    state: Literal["waiting", "reading", "writing"]
    prompt_tokens: int
    cached_tokens: int
    read_tokens: int
    new_tokens: int
    max_tokens: int
    age_s: float


@dataclass(frozen=True, slots=True)
class PageStatus:
    """Pages of a paged cache: held by requests, kept for later ones (and given up when room is needed), free."""

    page_tokens: int
    total: int
    used: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the start. `refused` is by code; `prompt_tokens` counts those of prompts that were begun, of which
    `cached_tokens` weren't computed."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`memory_bytes` is by tier; tokens a second are over the last seconds. `running` and `waiting` are requests."""

    backend: str
    running: int
    waiting: int
    max_running: int
    max_waiting: int
    context_tokens: int
    requests: tuple[RequestStatus, ...]
    pages: PageStatus | None
    memory_bytes: Mapping[str, int]
    prompt_tokens_per_s: float
    tokens_per_s: float
    totals: Totals
    uptime_s: float
    closing: bool
