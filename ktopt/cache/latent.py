"""The cache of multi-head latent attention: for each token one latent vector and one rotated key, in pages.

A `LatentLayer` stands in transformers' Cache for its DynamicLayer and answers the same calls. A page holds PAGE tokens of one
sequence; sequences that begin alike (beams, copies of a cache) hold the same pages, and a page is copied when one of them writes
into it. A token takes L + R numbers, whatever the number of heads: 1,152 bytes in bfloat16 for DeepSeek-V3, 612 in Q8_0.

Legend: B sequences, N tokens of each, L kv_lora_rank, R qk_rope_head_dim, W = L + R, G pages of T tokens, C pages of a sequence.
A page's last dimension is W too where it holds numbers, and of bytes where those are in Q8_0.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ktopt.cache import q8_0
from ktopt.cache.growing import GrowingLayer
from ktopt.diagnostics import KtoptError

PAGE_TOKENS = 64
KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""The storage types of numbers of a dtype, as GGUF and the kernels name them."""
GROWTH = 4
"""A pool that is full grows by a quarter."""


class PagePool:
    """Memory of pages (G, T, W), and how many sequences hold each. It grows, unless `most_pages` bounds it."""

    def __init__(
        self, width: int, page_tokens: int, dtype: torch.dtype, device: torch.device, most_pages: int | None = None
    ) -> None:
        self.most_pages = most_pages
        with torch.inference_mode(False):  # the cache may be used outside of it later
            self.pages_GTW = torch.empty(most_pages or 0, page_tokens, width, dtype=dtype, device=device)
        self._holders = [0] * (most_pages or 0)
        self._free = list(range(most_pages or 0))[::-1]

    @property
    def free(self) -> int:
        """Pages that can still be had, where the pool is bounded."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many pages, each held once. KtoptError where a bounded pool has fewer."""
        while len(self._free) < count:
            self._grow(count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: list[int]) -> None:
        """Note one more holder of each."""
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: list[int]) -> None:
        """Note one holder less of each."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def own(self, page: int) -> int:
        """A page that only the caller, one of this page's holders, may write into: itself, or a copy."""
        if self._holders[page] == 1:
            return page
        copy = self.take(1)[0]
        self.pages_GTW[copy] = self.pages_GTW[page]
        self.drop([page])
        return copy

    def _grow(self, count: int) -> None:
        have, tokens, width = self.pages_GTW.shape
        if self.most_pages is not None:
            raise KtoptError(
                f"the latent cache is full: it has {have} pages of {tokens} tokens, all taken, and {count} more are needed"
            )
        old = self.pages_GTW
        with torch.inference_mode(False):
            grown = torch.empty(max(have + count, have + have // GROWTH), tokens, width, dtype=old.dtype, device=old.device)
        grown[:have] = old
        self.pages_GTW = grown
        self._free = list(range(have, grown.shape[0]))[::-1] + self._free
        self._holders += [0] * (grown.shape[0] - have)


class LatentLayer(DynamicLayer):
    """The latents of one layer for B sequences of the same length, padding included.

    page_tokens  tokens of a page
    kept         what numbers are kept in: a dtype, "Q8_0" (see q8_0.py), or None for the dtype of the first that come
    max_tokens   tokens of a sequence at most, whose pages are then there from the start (what CUDA graphs want): whole pages;
                 None lets it grow

    `append` adds tokens, `latents` reads them, `table` says where they are. `update` answers them whole, as transformers' own
    attention wants them. `dtype` is that of the numbers that are read, `kind` the storage type of those in the pages. A deep copy
    shares all pages.
    """

    pool: PagePool | None = None
    is_initialized: bool

    def __init__(
        self, page_tokens: int = PAGE_TOKENS, kept: torch.dtype | str | None = None, max_tokens: int | None = None
    ) -> None:
        if page_tokens < 1 or (max_tokens is not None and (max_tokens < 1 or max_tokens % page_tokens)):
            raise KtoptError(f"page_size {page_tokens} doesn't divide the {max_tokens} tokens of the cache: take a divisor of it")
        if isinstance(kept, str) and kept != q8_0.NAME:
            raise KtoptError(f"a latent cache keeps numbers of a dtype, or {q8_0.NAME}, not {kept}")
        self.page_tokens, self.max_tokens, self.kept = page_tokens, max_tokens, kept
        self.dtype = kept if isinstance(kept, torch.dtype) else None
        self.expanded: GrowingLayer | None = None
        self._held: list[list[int]] = []
        self._tokens = self._latent = self._rope = self._layout = 0
        self._table: torch.Tensor | None = None
        super().__init__()

    # transformers reads and sets these; they are made of the pages
    keys = property(lambda self: self._part(0), lambda self, tensor: self._refuse(tensor))
    values = property(lambda self: self._part(1), lambda self, tensor: self._refuse(tensor))

    def _refuse(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            raise KtoptError("the tokens of a latent cache can't be set: use update, crop, reorder_cache or batch_select_indices")

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of a token's latent and of its key."""
        return self._latent, self._rope

    @property
    def kind(self) -> str | None:
        """The storage type of what the pages hold, None for one that the kernels don't know."""
        return self.kept if isinstance(self.kept, str) else KINDS.get(self.dtype)  # type: ignore[arg-type]

    def _part(self, which: int) -> torch.Tensor | None:
        if self.pool is None:
            return None
        whole_B1NW = self.latents(0, self._tokens).unsqueeze(1)
        return whole_B1NW[..., self._latent :] if which else whole_B1NW[..., : self._latent]

    @property
    def stored(self) -> list[torch.Tensor]:
        """The memory that it holds, pages for tokens to come included."""
        made = [] if self.pool is None else [self.pool.pages_GTW]
        return made if self.expanded is None else [*made, *self.expanded.stored]

    @property
    def batch(self) -> int:
        return len(self._held)

    def start(self, batch: int, latent: int, rope: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make an empty cache for so many sequences, unless it is made. `dtype` is that of numbers where nothing says otherwise."""
        if self.is_initialized:
            return
        self.device, self.dtype, self._latent, self._rope = device, self.dtype or dtype, latent, rope
        bound = None if self.max_tokens is None else batch * self.max_tokens // self.page_tokens
        width, held = latent + rope, self.dtype
        if self.kept == q8_0.NAME:
            width, held = q8_0.stored_bytes(width), torch.uint8
        self.pool = PagePool(width, self.page_tokens, held, device, bound)
        self._held = [[] for _ in range(batch)]
        self._tokens = 0
        self.is_initialized = True

    def lend(self, pages: list[list[int]], tokens: int, widths: tuple[int, int]) -> None:
        """Take over pages of each sequence with so many tokens, in a pool that was set, where another keeps count of holders."""
        self._held, self._tokens, self._table = pages, tokens, None
        self._latent, self._rope = widths

    def check_room(self, tokens: int) -> None:
        """KtoptError where so many more tokens are more than the cache may hold: to be called before any work."""
        if self.max_tokens is not None and self._tokens + tokens > self.max_tokens:
            raise KtoptError(
                f"the latent cache holds {self.max_tokens} tokens: {self._tokens} are there, and {tokens} more are too many. Make "
                "it larger, or shorten the prompt"
            )

    def reserve(self, tokens: int) -> None:
        """Give each sequence pages of its own for so many more tokens. KtoptError where they are more than the cache may hold."""
        assert self.pool is not None
        self.check_room(tokens)
        first = self._tokens // self.page_tokens
        wanted = -(-(self._tokens + tokens) // self.page_tokens)
        for pages in self._held:
            for at in range(first, len(pages)):
                own = self.pool.own(pages[at])
                if own != pages[at]:
                    pages[at], self._table = own, None
            if wanted > len(pages):
                pages += self.pool.take(wanted - len(pages))
                self._table = None

    def advance(self, tokens: int) -> None:
        """Count tokens that have been written into the pages that were reserved for them."""
        self._tokens += tokens

    def append(self, latents_BSW: torch.Tensor) -> None:
        """Add S tokens to each sequence. KtoptError where they are more than the cache may hold."""
        assert self.pool is not None
        added = latents_BSW.shape[1]
        if self.kept == q8_0.NAME:
            latents_BSW = q8_0.quantized(latents_BSW)
        self.reserve(added)
        first, size = self._tokens // self.page_tokens, self.page_tokens
        if added == 1 and self.batch == 1:
            self.pool.pages_GTW[self._held[0][first], self._tokens % size] = latents_BSW[0, 0]
        else:
            at_S = torch.arange(self._tokens, self._tokens + added, device=self.device)
            slots_BS = self.table()[:, at_S // size].long() * size + at_S % size
            self.pool.pages_GTW.view(-1, latents_BSW.shape[2])[slots_BS] = latents_BSW.to(self.pool.pages_GTW.dtype)
        self._tokens += added

    def table(self) -> torch.Tensor:
        """The pages of each sequence in the order of its tokens, int32 (B, C) on the cache's device."""
        if self._table is None:
            self._table = torch.tensor(self._held, dtype=torch.int32, device=self.device).view(len(self._held), -1)
            self._layout = hash(tuple(map(tuple, self._held)))
        return self._table

    @property
    def layout(self) -> int:
        """A number that layers have in common where their sequences have the same pages."""
        self.table()
        return self._layout

    def latents(self, start: int, end: int) -> torch.Tensor:
        """Tokens [start, end) of each sequence: (B, end - start, W), numbers of `dtype`."""
        stored = self._stored(start, end)
        return q8_0.numbers_of(stored, self.dtype) if self.kept == q8_0.NAME else stored  # type: ignore[arg-type]

    def _stored(self, start: int, end: int) -> torch.Tensor:
        assert self.pool is not None
        first, size = start // self.page_tokens, self.page_tokens
        if self.batch == 1 and start < end:  # pages that lie together are read where they are
            pages = self._held[0][first : -(-end // size)]
            if pages == list(range(pages[0], pages[0] + len(pages))):
                run_1NW = self.pool.pages_GTW[pages[0] : pages[-1] + 1].view(1, -1, self.pool.pages_GTW.shape[2])
                return run_1NW[:, start - first * size : end - first * size]
        pages_BC = self.table()[:, first : -(-end // size)].long()
        gathered = self.pool.pages_GTW[pages_BC].flatten(1, 2)
        return gathered[:, start - first * size : end - first * size]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append latents (B, 1, S, L) and rotated keys (B, 1, S, R); answers all that there are, in the dtype of those given."""
        self.lazy_initialization(key_states, value_states)
        self.append(torch.cat((key_states, value_states), dim=-1).squeeze(1))
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.start(key_states.shape[0], key_states.shape[-1], value_states.shape[-1], key_states.dtype, key_states.device)

    def get_seq_length(self) -> int:
        return self._tokens

    def get_max_length(self) -> int:
        return -1 if self.max_tokens is None else self.max_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: -n of them, as transformers counts it."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number, of tokens to remove, not {tokens_to_remove}")
        self._tokens = max(0, self._tokens + tokens_to_remove)
        wanted = -(-self._tokens // self.page_tokens)
        for pages in self._held:
            if len(pages) > wanted:
                self.pool.drop(pages[wanted:])  # type: ignore[union-attr]
                del pages[wanted:]
                self._table = None
        if self.expanded is not None:
            self.expanded.crop(min(0, self._tokens - self.expanded.past))

    def reset(self) -> None:
        self._release()
        self._held, self._tokens, self._table, self.pool, self.expanded = [], 0, None, None, None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(torch.arange(self.batch)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(self.batch) for _ in range(repeats)])

    def _select(self, rows: list[int]) -> None:
        chosen = [list(self._held[row]) for row in rows]
        if self.pool is not None:
            for pages in chosen:
                self.pool.hold(pages)
        self._release()
        self._held, self._table = chosen, None
        if self.expanded is not None:
            self.expanded.reorder_cache(torch.tensor(rows))  # type: ignore[arg-type]

    def _release(self) -> None:
        if self.pool is not None:
            for pages in self._held:
                self.pool.drop(pages)

    def __deepcopy__(self, memo: Any) -> LatentLayer:
        """A cache of its own over the same pages, which are copied where one of both writes."""
        made = LatentLayer(self.page_tokens, self.kept, self.max_tokens)
        if self.pool is not None:
            if self.max_tokens is not None:  # a bounded pool has no pages for two
                made.start(self.batch, *self.widths, self.dtype, self.device)  # type: ignore[arg-type]
                made.append(self.latents(0, self._tokens))
                return made
            made.pool, made.dtype, made.device, made.is_initialized = self.pool, self.dtype, self.device, True
            (made._latent, made._rope), made._tokens = self.widths, self._tokens
            made._held = [list(pages) for pages in self._held]
            for pages in made._held:
                self.pool.hold(pages)
        return made

    def __del__(self) -> None:
        self._release()


def latent_layer(cache: Cache, index: int, page_tokens: int, kept: torch.dtype | str | None) -> LatentLayer | None:
    """A cache's layer `index` as a paged latent one: transformers' own dynamic layer is replaced, and what it holds is taken over.
    A latent layer that is there stays as it is. None for layers of other kinds, and for a cache that moves its layers off their
    device."""
    if cache.offloading:
        return None
    if cache.layer_class_to_replicate is DynamicLayer:
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(layer, LatentLayer):
        return layer
    if type(layer) is not DynamicLayer:
        return None
    made = LatentLayer(page_tokens, kept)
    if layer.is_initialized and layer.keys.numel():
        made.update(layer.keys, layer.values)
    cache.layers[index] = made
    return made


def latent_cache(layers: int, max_tokens: int, page_tokens: int = PAGE_TOKENS, kept: torch.dtype | str | None = None) -> Cache:
    """A transformers Cache of latent layers whose memory is there from the first token on: max_tokens for each sequence, in whole
    pages. KtoptError where page_tokens doesn't divide max_tokens."""
    return Cache(layers=[LatentLayer(page_tokens, kept, max_tokens) for _ in range(layers)])
