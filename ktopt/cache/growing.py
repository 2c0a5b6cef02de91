"""Cache layers in memory that grows by steps: a new token is written in place, where transformers' own copy everything for each.

They stand in transformers' Cache for its DynamicLayer and DynamicSlidingWindowLayer, and answer the same calls. A kernel may write
into them by itself: `room` gives it memory, `advance` says that it has written.

Legend: B sequences, H heads that hold keys and values, N tokens, D numbers of one head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

STEP_TOKENS = 256
"""Memory grows by a quarter at least, to a multiple of so many tokens that leaves room for one more."""


class GrowingLayer(DynamicLayer):
    """Keys and values (B, H, N, D) in `dtype`, or where that is None in that of the first that come. Memory for `expected_tokens`
    is taken at once.

    `update` answers keys and values in the dtype of those that it is given: converted, and slow, where the layer holds another.
    """

    def __init__(self, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        self._stored: list[torch.Tensor] = []  # keys and values (B, H, capacity, D)
        self._counts = [0, 0]  # tokens of each: the same, but while one of both has been set
        super().__init__(**kwargs)
        self.dtype = dtype
        self.expected_tokens = 0

    # transformers reads, cuts and replaces `keys` and `values`: they are views of what is held, and what is set is taken over
    def _view(self, which: int) -> torch.Tensor | None:
        return self._stored[which][:, :, : self._counts[which]] if self._stored else None

    def _adopt(self, which: int, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            self._stored, self._tokens = [], 0
            return
        if not self._stored:
            self._stored, self._counts = [tensor, tensor], [tensor.shape[2]] * 2
        self._stored[which], self._counts[which] = tensor, tensor.shape[2]

    @property
    def _tokens(self) -> int:
        return self._counts[0]

    @_tokens.setter
    def _tokens(self, count: int) -> None:
        self._counts = [count, count]

    keys = property(lambda self: self._view(0), lambda self, tensor: self._adopt(0, tensor))
    values = property(lambda self: self._view(1), lambda self, tensor: self._adopt(1, tensor))

    @property
    def stored(self) -> list[torch.Tensor]:
        """Keys and values with all their memory, each (B, H, capacity, D) and contiguous."""
        return self._stored

    @property
    def past(self) -> int:
        """Tokens in memory: those seen, less those that a sliding window has left behind."""
        return self._tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.dtype = self.dtype or key_states.dtype
        with torch.inference_mode(False):  # the cache may be used outside of it later
            self._stored = [
                torch.empty((*states.shape[:2], 0, states.shape[3]), dtype=self.dtype, device=self.device)
                for states in (key_states, value_states)
            ]
        self._tokens = 0
        self.is_initialized = True

    def room(self, tokens: int) -> None:
        """Make memory for so many more tokens."""
        needed = max(self._tokens + tokens, self.expected_tokens)
        for which, held in enumerate(self._stored):
            if held.shape[2] >= needed and held.is_contiguous():
                continue
            capacity = max(needed, held.shape[2] + held.shape[2] // 4) // STEP_TOKENS * STEP_TOKENS + STEP_TOKENS
            with torch.inference_mode(False):
                grown = torch.empty((*held.shape[:2], capacity, held.shape[3]), dtype=held.dtype, device=held.device)
            grown[:, :, : self._tokens] = held[:, :, : self._tokens]
            self._stored[which] = grown

    def advance(self, tokens: int) -> None:
        """Count tokens that have been written after those that were there."""
        self._tokens += tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values (B, H, n, D); answers all that there are."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states)
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        tokens = key_states.shape[2]
        self.room(tokens)
        for held, states in zip(self._stored, (key_states, value_states), strict=True):
            held[:, :, self._tokens : self._tokens + tokens] = states
        self._tokens += tokens

    def get_seq_length(self) -> int:
        return self._tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: -n of them, as transformers counts it."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number, of tokens to remove, not {tokens_to_remove}")
        self._tokens = max(0, self._tokens + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._stored = [held.repeat_interleave(repeats, dim=0) for held in self._stored]

    def _select(self, indices: torch.Tensor) -> None:
        self._stored = [held[indices.to(held.device)] for held in self._stored]


class GrowingSlidingLayer(GrowingLayer, DynamicSlidingWindowLayer):
    """The same for a layer that sees `sliding_window` tokens. Older ones are left behind now and then, all at once."""

    def __init__(self, sliding_window: int, dtype: torch.dtype | None = None) -> None:
        self.cumulative_length: int = 0
        super().__init__(dtype=dtype, sliding_window=sliding_window)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = torch.tensor(self.sliding_window, device=self.device)

    def room(self, tokens: int) -> None:
        """Make memory for more tokens, first that of those which no token to come will see."""
        if self._stored and not self.record_past and self._stored[0].shape[2] < self._tokens + tokens:
            self._leave_behind()
        super().room(tokens)

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        self.cumulative_length += tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; answers those that the new tokens see: the last sliding_window - 1 before them, and theirs."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        self._append(key_states, value_states)
        self.cumulative_length += tokens
        seen = min(self._tokens, self.sliding_window - 1 + tokens)
        keys, values = self.keys[:, :, self._tokens - seen :], self.values[:, :, self._tokens - seen :]
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens. RuntimeError where that needs tokens which the window has left behind."""
        kept = self._tokens + tokens_to_remove
        if kept < min(self.cumulative_length + tokens_to_remove, self.sliding_window - 1):
            raise RuntimeError(
                f"the last {-tokens_to_remove} tokens can't be taken back: of those before them, too many have left the sliding "
                f"window of {self.sliding_window}. Call activate_past_recording before"
            )
        super().crop(tokens_to_remove)
        self.cumulative_length = max(0, self.cumulative_length + tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0

    def _leave_behind(self) -> None:
        keep = min(self._tokens, self.sliding_window - 1)
        for held in self._stored:
            held[:, :, :keep] = held[:, :, self._tokens - keep : self._tokens].clone()
        self._tokens = keep


def expect(cache: Cache, tokens: int) -> None:
    """Say how many tokens a cache is to hold soon, so that its layers needn't grow to them by steps."""
    cache.expected_tokens = tokens


def growing_layer(cache: Cache, index: int, dtype: torch.dtype | None) -> GrowingLayer | None:
    """A cache's layer `index` as one that grows in place: transformers' own dynamic layers are replaced, what they hold is taken
    over. None for layers of other kinds, and for a cache that moves its layers off their device."""
    if cache.offloading:
        return None
    if cache.layer_class_to_replicate is DynamicLayer:
        while len(cache.layers) <= index:
            cache.layers.append(GrowingLayer(dtype))
    layer = cache.layers[index]
    if isinstance(layer, GrowingLayer):
        return layer
    if type(layer) is DynamicLayer:
        made = GrowingLayer(dtype)
        made.expected_tokens = getattr(cache, "expected_tokens", 0)
    elif type(layer) is DynamicSlidingWindowLayer:
        made = GrowingSlidingLayer(layer.sliding_window, dtype)
        made.record_past = layer.record_past
    else:
        return None
    if layer.is_initialized and layer.keys.numel():
        made.lazy_initialization(layer.keys, layer.values)
        made._append(layer.keys, layer.values)
    if isinstance(made, GrowingSlidingLayer):
        made.cumulative_length = layer.cumulative_length
    cache.layers[index] = made
    return made
