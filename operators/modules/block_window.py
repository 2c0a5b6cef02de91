"""The last tokens of a layer's cache, as they came: unquantised, in one piece of memory, from which blocks leave at the front.

Legend: B sequences, G heads of keys and values, N tokens, C capacity, D numbers of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ktopt.cache.blocks.memory import SLACK_TOKENS
from ktopt.diagnostics import KtoptError
from ktopt.kernels.segments import CacheSegments

FLOAT16_LARGEST = 65504.0


class Zone:
    """Tokens' keys (B, G, C, D) and values (B, G, C, V), in one piece each; of latents, keys alone."""

    def __init__(self, memory: list[torch.Tensor]) -> None:
        self.memory = memory
        self._rows = [each.flatten(0, 1) for each in memory]

    def segments(self, first: int, end: int, starts_R: torch.Tensor | None, position: int) -> CacheSegments:
        """Tokens [first, end), the first of which stands at a position of the context, for kernels to attend to. What stands before
        a row's start isn't seen."""
        hidden = None if starts_R is None else (starts_R[:, None] - position).clamp(0, end - first)
        return CacheSegments(self._rows[0], self._rows[1] if len(self._rows) > 1 else None, first, end, hidden)


Staging = Callable[[int, torch.dtype], torch.Tensor]
"""Memory of so many numbers for the moment, the same for all who ask."""


class Window:
    """Keys (B, G, C, D) and values (B, G, C, V) in a dtype, or keys alone, of which `tokens` from `first` on are there. It has room
    for `least` tokens at any time; while more are in it (a prompt's chunk), they stand in memory of the moment."""

    def __init__(
        self, batch: int, heads: int, dims: list[int], dtype: torch.dtype, device: torch.device, least: int, staging: Staging
    ) -> None:
        self.shape, self.dims, self.dtype, self.device = (batch, heads), dims, dtype, device
        self.first = self.tokens = 0
        self._staging = staging
        with torch.inference_mode(False):  # the cache may be used outside of it later
            self._own = [torch.empty(batch, heads, least + SLACK_TOKENS, dim, dtype=dtype, device=device) for dim in dims]
        self._of_its_own = self.zone = Zone(self._own)

    @property
    def keys(self) -> torch.Tensor:
        """With all their memory."""
        return self.zone.memory[0]

    @property
    def values(self) -> torch.Tensor | None:
        return self.zone.memory[1] if len(self.zone.memory) > 1 else None

    @property
    def own(self) -> list[torch.Tensor]:
        """The memory that stays."""
        return self._own

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._own)

    @property
    def end(self) -> int:
        """Where the next token goes."""
        return self.first + self.tokens

    def there(self) -> list[torch.Tensor]:
        """The tokens' keys (B, G, N, D), and values."""
        return [held[:, :, self.first : self.end] for held in self.zone.memory]

    def room(self, tokens: int) -> None:
        """Make room for so many more."""
        if self.end + tokens <= self.keys.shape[2]:
            return
        wanted = self.tokens + tokens
        if wanted <= self._own[0].shape[2]:
            self._move(self._own)
            return
        numbers = self.shape[0] * self.shape[1] * wanted
        memory, at, wider = self._staging(numbers * sum(self.dims), self.dtype), 0, []
        for dim in self.dims:
            wider.append(memory[at : at + numbers * dim].view(*self.shape, wanted, dim))
            at += numbers * dim
        self._move(wider)

    def append(self, *states: torch.Tensor) -> None:
        """Add tokens: keys (B, G, n, D), and values. KtoptError for a number that float16 can't hold."""
        count = states[0].shape[2]
        self.room(count)
        for held, new in zip(self.zone.memory, states, strict=True):
            if self.dtype is torch.float16 and new.dtype is not torch.float16 and not float(new.abs().amax()) <= FLOAT16_LARGEST:
                raise KtoptError(
                    f"a key or a value has a number beyond float16's {FLOAT16_LARGEST:g}: give `kv_type: BF16` or FP32"
                )
            held[:, :, self.end : self.end + count] = new
        self.tokens += count

    def drop(self, tokens: int) -> None:
        """Let the first so many go."""
        self.first, self.tokens = self.first + tokens, self.tokens - tokens

    def shrink(self) -> None:
        """Give memory of the moment back, if what is left has room without."""
        if self.zone is not self._of_its_own and self.tokens <= self._own[0].shape[2]:
            self._move(self._own)

    def put_before(self, states: list[torch.Tensor]) -> None:
        """Put tokens before those that are there."""
        joined = [torch.cat((old.to(self.dtype), new), dim=2) for old, new in zip(states, self.there(), strict=True)]
        self.first = self.tokens = 0
        self.zone = self._of_its_own
        self.append(*joined)

    def _move(self, to: list[torch.Tensor]) -> None:
        for old, new in zip(self.there(), to, strict=True):
            overlaps = old.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()
            new[:, :, : self.tokens] = old.clone() if overlaps else old
        self.zone, self.first = (self._of_its_own if to is self._own else Zone(to)), 0
