"""The request of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ktopt.server.protocol.common import Generation, refuse_values

MOST_PROMPTS = 64
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[Token], Field(min_length=1, fail_fast=True)]


class CompletionRequest(Generation):
    """OpenAI's parameters, and those of other servers that change how tokens are chosen."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1, le=1024)
    suffix: str | None = None

    def check(self) -> None:
        """ApiError for what OpenAI's API has and this server doesn't do."""
        refuse_values(
            self,
            {
                "suffix": (("",), "this server writes no text between two others"),
                "best_of": ((1, self.n or 1), "this server gives every choice that it makes; give n"),
            },
        )
        if self.echo and self.logprobs is not None:
            refuse_values(self, {"logprobs": ((), "there are none of a prompt: leave out echo or logprobs")})

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given
