"""A session: one context of a model that attends to blocks. It reads a prompt in chunks, decodes, and knows what is in its cache.

Legend: N tokens of a prompt, V words of the vocabulary.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ktopt.cache.blocks.memory import LayerShape, layer_shapes
from ktopt.config import LongContextSettings
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.long_context.identity import model_hash
from ktopt.long_context.kvc2 import KVC2
from ktopt.long_context.room import check_room, device_of, with_answer
from ktopt.long_context.statistics import SessionStatistics
from ktopt.runtime.decoding import Decoder
from ktopt.runtime.generation import context_tokens
from ktopt.working_memory import block_settings, prompt_piece

log = logging.getLogger(__name__)

CACHE = "ktopt_blocks"
"""Where transformers' Cache holds what its layers of blocks have in common."""
LEAST_AGAIN = 2
"""Tokens of a prompt that are read again at least: one alone would choose blocks, as one that is decoded does."""
Progress = Callable[[int, int], None]
"""Called with the tokens of a prompt that have been read, and all of them."""


class LongContextSession:
    """A context of one sequence.

    model       a model whose plan has attention that keeps its cache in blocks, as `load_model(mode="long_context")` makes it
    tokenizer   its tokenizer, or None
    progress    called while a prompt is read
    weights     the files of the model's weights, by which blocks of its prompts are known where `prefix_reuse` is on

    `tokens` are those in the cache. KtoptError where the settings can't be, or where a full cache finds no room.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, progress: Progress | None = None, *, weights: str | os.PathLike[str] | None = None
    ) -> None:
        self.model, self.tokenizer, self.progress = model, tokenizer, progress
        self.attention = [module for module in model.modules() if hasattr(module, "use_long_context")]
        if not self.attention or getattr(model, "ktopt_plan", None) is None:
            raise KtoptError("this model's attention keeps no cache in blocks: load it with mode='long_context'")
        long, kvc2 = block_settings(model.ktopt_plan)
        self.settings, self.kvc2 = long, KVC2(self, kvc2)
        self.piece = prompt_piece(model.ktopt_plan) or long.chunk_size
        self.capacity = self._make_room(model, replace(long, chunk_size=self.piece))
        self._words = int(model.get_input_embeddings().num_embeddings)
        self._decoder, self._made_for = Decoder(model), context_tokens(model)
        self._hash = model_hash(model.ktopt_plan, weights, long) if self.kvc2.folder is not None else ""
        self._take_cache()
        if self.prefixes is None:
            self._try_cache()

    def _make_room(self, model: Any, long: LongContextSettings) -> int:
        """Have caches hold an answer beside the longest prompt; answers the tokens that they hold."""
        whole = with_answer(long)
        check_room(model.ktopt_plan, whole, self.kvc2.settings)
        for module in self.attention:
            module.use_long_context(whole, self.kvc2.settings)
        held: LongContextSettings = self.attention[0].settings[0]
        return int(held.max_seq_len)

    def _take_cache(self) -> None:
        self.cache: Any = self._decoder.new_cache()
        self.tokens = torch.empty(1, 0, dtype=torch.long)
        self.statistics = SessionStatistics()
        self._logits_1V: torch.Tensor | None = None
        self._as_read = 0  # the first tokens that were read many at a time: others have attended to chosen blocks
        self.prefixes = self._open_prefixes()

    def _shapes(self) -> list[LayerShape]:
        """Of the layers that keep tokens."""
        return [shape for shape in layer_shapes(self.model.config.to_dict()) if shape is not None]

    def _try_cache(self) -> None:
        """Open a cache and close it: what its budgets, the machine or the disk don't hold is told before there is a prompt."""
        shape = next(shape for shape in self._shapes() if shape.window is None)
        blocks = self.attention[0].new_blocks()
        device = torch.device(device_of(self.model.ktopt_plan))
        try:
            blocks.open(shape.rows, shape.key_dim, shape.value_dim, shared=shape.shared, device=device)
        finally:
            blocks.close()

    def _open_prefixes(self) -> Any:
        """What begins a context with blocks of an earlier one; None without prefix_reuse."""
        if self.kvc2.folder is None:
            return None
        kept = self._shapes()
        if any(shape.window is not None for shape in kept):
            raise KtoptError("`prefix_reuse` isn't for models with sliding windows, whose tokens are in no blocks: write false")
        shape = kept[0]
        device = torch.device(device_of(self.model.ktopt_plan))
        folder, dims = str(self.kvc2.folder), (shape.key_dim, shape.value_dim)
        return self.attention[0].prefixes(self.cache, folder, self._hash, shape.rows, dims, device)

    def _keep(self) -> None:
        """Keep the context's blocks for later ones. Where they can't be, the log says so, and the context goes on."""
        if self.prefixes is None:
            return
        try:
            self.prefixes.keep(self.tokens[0, : self._as_read].tolist())
        except KtoptError as error:
            log.warning("the blocks of this prompt aren't kept for later ones: %s", error)

    def _restore(self, ids_1N: torch.Tensor) -> None:
        """Begin an empty context with what is kept of a prompt. Where nothing can be taken the log says so, and all is read."""
        if self.prefixes is not None and not self.length:
            try:
                found = self.prefixes.restore(ids_1N[0].numpy())
            except KtoptError as error:
                log.warning("the prompt is read from its first token on: %s", error)
                return
            self.tokens, self._as_read = ids_1N[:, :found], found
            self.statistics.reused_tokens += found

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return int(self.tokens.shape[1])

    def reset(self) -> None:
        """Forget the context, and begin another. UsageError where the session is closed."""
        self._check_open()
        self._close_cache()
        self._take_cache()

    def _check_open(self) -> None:
        if self.cache is None:
            raise UsageError("this session is closed")

    def close(self) -> None:
        """Give back the cache's memory and files. Nothing more can be read."""
        self._close_cache()
        self.cache = None

    def __enter__(self) -> LongContextSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_cache(self) -> None:
        if (blocks := self.blocks) is not None:
            blocks.close()

    @property
    def blocks(self) -> Any:
        """What the cache's layers of blocks have in common; None before the first token."""
        return None if self.cache is None else self.cache.__dict__.get(CACHE)

    def chunk_prefill(self, inputs: torch.Tensor, cache_position: torch.Tensor | None = None, past_key_values: Any = None) -> Any:
        """Read tokens (N) or (1, N) a chunk at a time; the logits (1, V) of what follows the last.

        cache_position   where they stand, one after the other: from 0 a new context, from `length` more of this one, from between
                         in the place of what was there. By default a new context
        past_key_values  None, or this session's own cache

        UsageError for tokens and positions that can't be, KtoptError where there are more than the cache holds, before any work.
        """
        ids_1N = self._ids(inputs, past_key_values)
        first = 0 if cache_position is None else _first_of(cache_position, ids_1N.shape[1])
        if first > self.length:
            raise UsageError(f"cache_position begins at {first}, and the context has {self.length} tokens")
        self._check_room(first + ids_1N.shape[1], longest=self.settings.max_seq_len)
        if first == 0 and self.length:
            self.reset()
        self._crop(first)
        if first == 0:
            self._restore(ids_1N)
        return self._read(ids_1N[:, self.length - first :], prompt=True)

    def decode_wrapper(
        self,
        next_token: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        cache_position: torch.Tensor | None = None,
        cuda_graph_runner: Any = None,
        past_key_values: Any = None,
        inputs: torch.Tensor | None = None,
        seq_length: int | None = None,
    ) -> torch.Tensor:
        """The likeliest token (1) after those so far.

        next_token   a token (1) that is read first, after those in the cache; or None
        inputs       where that is None: all tokens so far (1, N), of which those that the cache hasn't are read first
        seq_length   how many `inputs` are

        position_ids and cache_position may be where a given `next_token` stands; cuda_graph_runner is for KTransformers' sake, and
        nothing is run by it. UsageError for tokens and positions that can't be.
        """
        given = next_token if next_token is not None else inputs
        if given is None:
            raise UsageError("decode_wrapper needs next_token, or all tokens so far as inputs")
        ids_1N, device = self._ids(given, past_key_values), getattr(given, "device", "cpu")
        if next_token is None:
            return self.likeliest(self._rest_of(ids_1N, seq_length)).to(device)
        for name, at in (("position_ids", position_ids), ("cache_position", cache_position)):
            if at is not None and (first := _first_of(at, ids_1N.shape[1], name)) != self.length:
                raise UsageError(f"{name} is {first}, and the next token stands at {self.length}")
        return self.likeliest(ids_1N).to(device)

    def likeliest(self, more_1N: torch.Tensor) -> torch.Tensor:
        """The likeliest token (1) after these, which are read first; they may be none."""
        self._check_open()
        logits_1V = self._read(more_1N) if more_1N.shape[1] else self._logits_1V
        if logits_1V is None:
            raise UsageError("there is nothing in the context yet: read a prompt first")
        return logits_1V.argmax(-1)

    def generate(
        self, prompt: torch.Tensor, max_new_tokens: int, choose: Callable[[torch.Tensor, torch.Tensor], int] | None = None
    ) -> Iterator[int]:
        """Tokens after a prompt (1, N), one by one, without an end of their own. What the context has in common with the prompt
        isn't read again. `choose` makes a token of the tokens so far (1, N) and their logits (1, V), by default the likeliest."""
        ids_1N = self._ids(prompt, None)
        self._check_room(ids_1N.shape[1], longest=self.settings.max_seq_len)
        if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise UsageError(f"max_new_tokens must be a whole number from 0 on, not {max_new_tokens!r}")
        self._check_room(ids_1N.shape[1] + max_new_tokens - 1)
        logits = self.go_to(ids_1N)
        for number in range(max_new_tokens):
            token = int(logits.argmax(-1)) if choose is None else choose(self.tokens, logits)
            yield token
            if number + 1 < max_new_tokens:
                logits = self.read(torch.tensor([[token]]))

    def go_to(self, prompt: torch.Tensor) -> torch.Tensor:
        """Make the tokens of a prompt (1, N) those of the context; the logits (1, V) of what follows. What the context has in
        common with them isn't read again. Where `progress` raises, the context keeps what it has read."""
        ids_1N = self._ids(prompt, None)
        self._check_room(ids_1N.shape[1], longest=self.settings.max_seq_len)
        if self.prefixes is not None and self.length and int(self.tokens[0, 0]) != int(ids_1N[0, 0]):
            self.reset()  # nothing of it stays, and an empty context can begin with what is kept
        self._restore(ids_1N)
        rest = self._rest_of(ids_1N, None)
        logits = self._read(rest, prompt=True) if rest.shape[1] else self._logits_1V
        assert logits is not None
        return logits

    def read(self, more: torch.Tensor) -> torch.Tensor:
        """Read tokens (N) or (1, N) after those in the context; the logits (1, V) of what follows."""
        return self._read(self._ids(more, None))

    def _rest_of(self, ids_1N: torch.Tensor, count: int | None) -> torch.Tensor:
        """What of all tokens so far is still to be read; what the cache has that they haven't is forgotten."""
        if count is not None and count != ids_1N.shape[1]:
            raise UsageError(f"seq_length is {count}, and inputs are {ids_1N.shape[1]} tokens")
        common = min(self.length, ids_1N.shape[1])
        differ = (self.tokens[:, :common] != ids_1N[:, :common]).nonzero()
        if len(differ):
            common = int(differ[0, 1])
        if common < self.length or (common == ids_1N.shape[1] and self._logits_1V is None):
            common = max(0, min(common, ids_1N.shape[1] - LEAST_AGAIN))
        self._crop(common)
        return ids_1N[:, common:]

    def _crop(self, tokens: int) -> None:
        if tokens < self.length:
            self.cache.crop(tokens - self.length)
            self.tokens, self._logits_1V = self.tokens[:, :tokens], None
            self._as_read = min(self._as_read, tokens)

    def _ids(self, inputs: torch.Tensor, past: Any) -> torch.Tensor:
        """Tokens as (1, N) on the CPU."""
        self._check_open()
        if past is not None and past is not self.cache:
            raise UsageError("past_key_values is None or this session's own cache: it keeps its blocks itself")
        given = _numbers(inputs, "tokens")
        ids_1N = given.reshape(1, -1) if given.dim() < 2 else given
        if ids_1N.shape[0] != 1 or ids_1N.dim() != 2 or not ids_1N.numel():
            raise UsageError(f"a session reads tokens of one sequence, not {tuple(given.shape)} of {given.dtype}")
        least, most = (int(each) for each in ids_1N.aminmax())
        if least < 0 or most >= self._words:
            raise UsageError(f"tokens of this model are from 0 to {self._words - 1}, and here is {least if least < 0 else most}")
        return ids_1N

    def _check_room(self, tokens: int, longest: int | None = None) -> None:
        """KtoptError where a context of so many tokens is more than the cache holds, or than a prompt may have (`longest`). The
        log says once where it is more than the model was made for."""
        if tokens > min(self.capacity, longest or self.capacity):
            what = f"the prompt has {tokens} tokens" if longest else f"prompt and answer are {tokens} tokens"
            held = f"`max_seq_len` is {self.settings.max_seq_len}, beside {self.settings.max_new_tokens} of an answer"
            raise KtoptError(
                f"{what}, and the cache holds {longest or self.capacity} ({held}): raise `max_seq_len`, or shorten the prompt"
            )
        if self._made_for is not None and tokens > self._made_for:
            log.warning(
                "%d tokens, and the model was made for %d: what it says beyond them may be of no use", tokens, self._made_for
            )
            self._made_for = None

    def _read(self, ids_1N: torch.Tensor, prompt: bool = False) -> torch.Tensor:
        """Read tokens (at least one) after those in the cache; the last one's logits (1, V). Where a step fails the context is
        lost, since some of its layers may have read tokens that others haven't."""
        self._check_room(self.length + ids_1N.shape[1])
        start, count = time.perf_counter(), ids_1N.shape[1]
        for first in range(0, count, self.piece):
            try:
                self._logits_1V = self._step(ids_1N[:, first : first + self.piece], prompt or count > 1)
            except BaseException:
                self.reset()
                raise
            if prompt and self.progress is not None:
                self.progress(min(first + self.piece, count), count)
        self.statistics.count(count, time.perf_counter() - start, prompt)
        if prompt:
            self._keep()
        assert self._logits_1V is not None
        return self._logits_1V

    def _step(self, ids_1N: torch.Tensor, reading: bool) -> torch.Tensor:
        """Some tokens, which are a prompt's while `reading`, even if it is one alone."""
        if (blocks := self.blocks) is not None:
            blocks.reading = reading
        logits_1V = self._decoder.logits(ids_1N.to(self._decoder.device), self.cache)[:, 0]
        if self._as_read == self.length and reading:
            self._as_read += ids_1N.shape[1]
        self.tokens = torch.cat((self.tokens, ids_1N), dim=1)
        return logits_1V

    def table(self) -> list[tuple[str, ...]]:
        """KVC2.table: the tiers of the cache."""
        return self.kvc2.table()


def _numbers(given: Any, name: str) -> torch.Tensor:
    """Whole numbers as a tensor on the CPU. UsageError for anything else."""
    try:
        numbers = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{name} must be whole numbers, as a tensor or a list, not {type(given).__name__}") from None
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool:
        raise UsageError(f"{name} must be whole numbers, not {tuple(numbers.shape)} of {numbers.dtype}")
    return numbers.detach().to("cpu", torch.long)


def _first_of(positions: Any, count: int, name: str = "cache_position") -> int:
    """Where tokens stand that follow one another. UsageError where they don't, or aren't so many."""
    given = _numbers(positions, name).reshape(-1)
    if len(given) != count:
        raise UsageError(f"{name} has {len(given)} positions for {count} tokens")
    first = int(given[0])
    if not torch.equal(given, torch.arange(first, first + count)):
        raise UsageError(f"{name} must be {first} to {first + count - 1}, one after the other")
    return first
