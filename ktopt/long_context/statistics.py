"""What a session has done: tokens and seconds, of prompts and of answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SessionStatistics:
    """prompt_tokens, prompt_s     read as prompts
    new_tokens, decode_s        read after that, one by one
    reused_tokens               of prompts that weren't read, since their blocks were there from an earlier session
    """

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    new_tokens: int = 0
    decode_s: float = 0.0
    reused_tokens: int = 0

    def count(self, tokens: int, seconds: float, prompt: bool) -> None:
        if prompt:
            self.prompt_tokens += tokens
            self.prompt_s += seconds
        else:
            self.new_tokens += tokens
            self.decode_s += seconds

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prompt_s if self.prompt_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.new_tokens / self.decode_s if self.decode_s else 0.0
