"""A paged cache for many sequences of one model at once: what continuous batching runs on."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktopt.cache.paged.allocator import ROOT, PageAllocator
from ktopt.cache.paged.batch import PagedBatch
from ktopt.cache.paged.model import ModelCall, shapes_of
from ktopt.cache.paged.pools import pools_of
from ktopt.cache.paged.prefixes import PrefixFolder
from ktopt.cache.paged.sequence import Sequence
from ktopt.diagnostics import UsageError

PAGE_TOKENS = 64


class PagedCache:
    """Room for `tokens` tokens of a model's sequences, in pages of `page_tokens`. All memory is taken at once.

    With `steady` a token's result in a fused layer of quantised weights has the same bits whoever else is in the step, and not only
    nearly: even one row goes through the kernels for many then, which takes about a tenth longer.

    Whole pages are kept in the folder `prefixes` as well, and prompts find them there.

    KtoptError where the model's layers can't be paged, with the reason; finding that out takes a step of one token. One thread
    works with a cache; numbers may be read by others.
    """

    def __init__(
        self, model: Any, tokens: int, page_tokens: int = PAGE_TOKENS, *, steady: bool = False, prefixes: PrefixFolder | None = None
    ) -> None:
        if tokens < 1 or page_tokens < 16 or page_tokens % 16:
            raise UsageError(
                f"a paged cache has room for at least a token, in pages of a multiple of 16, not {tokens}, {page_tokens}"
            )
        self.call = ModelCall(model)
        self.page_tokens, self.steady = page_tokens, steady
        shapes = shapes_of(self.call, page_tokens)
        self.allocator = PageAllocator(self.pages_for(tokens), page_tokens)
        self.pools = pools_of(shapes, self.pages, page_tokens)
        self.bytes_per_token = sum(shape.bytes_per_token for shape in shapes.values())
        self._sequences: set[Sequence] = set()
        self.prefixes = prefixes
        if prefixes is not None:
            prefixes.open(shapes.values(), page_tokens)

    @property
    def pages(self) -> int:
        return self.allocator.pages

    @property
    def free_pages(self) -> int:
        """Pages that can be had: empty ones, and those of prefixes that nobody holds."""
        return self.allocator.free_pages

    @property
    def cached_pages(self) -> int:
        """Pages of prefixes that nobody holds."""
        return self.allocator.cached_pages

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold."""
        return self.allocator.used_pages

    @property
    def nbytes(self) -> int:
        """What all pages take."""
        return self.pages * self.page_tokens * self.bytes_per_token

    def pages_for(self, tokens: int) -> int:
        """Whole pages that so many tokens take."""
        return -(-tokens // self.page_tokens)

    def sequence(self, token_ids: Ids[int]) -> Sequence:
        """A sequence that is to begin with these tokens, and has as many of them already as indexed pages hold, or files, but not
        the last: one at least is left to compute."""
        size = self.page_tokens
        most = max(0, len(token_ids) - 1) // size
        ids = np.asarray(token_ids[: most * size], dtype=np.int32)
        keys = [ids[at * size : (at + 1) * size].tobytes() for at in range(most)]
        found = self.allocator.find(keys)
        self.allocator.hold(found)
        chain = b"" if self.prefixes is None else self._restore(self.prefixes, keys, found)
        made = Sequence([int(each) for each in token_ids[: len(found) * size]], found)
        made.indexed, made.chain = len(found), chain
        self._sequences.add(made)
        return made

    def _restore(self, prefixes: PrefixFolder, keys: list[bytes], found: list[int]) -> bytes:
        """Continue the pages of a prompt that were found by those on disk, as far as there is room; the last one's hash."""
        chain = prefixes.root
        for at, key in enumerate(keys):
            following = prefixes.following(chain, key)
            if at < len(found):
                prefixes.used(following, at)
            else:
                body = prefixes.read(following, at, key) if self.free_pages else None
                if body is None:
                    break
                [page] = self.allocator.take(1)
                self._fill(page, body)
                found.append(self.allocator.record(found[-1] if found else ROOT, page, key))
            chain = following
        return chain

    def _page_views(self, page: int) -> list[torch.Tensor]:
        return [part for pool in self.pools.values() for part in pool.page_bytes(page)]

    def _fill(self, page: int, body: NDArray[np.uint8]) -> None:
        at, stored = 0, torch.from_numpy(body)
        for view in self._page_views(page):
            view.copy_(stored[at : at + len(view)])
            at += len(view)

    def _body(self, page: int) -> NDArray[np.uint8]:
        views = self._page_views(page)
        body = np.empty(sum(map(len, views)), dtype=np.uint8)
        at, stored = 0, torch.from_numpy(body)
        for view in views:
            stored[at : at + len(view)].copy_(view)
            at += len(view)
        return body

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """Pages that the sequence lacks for so many tokens in all."""
        return max(0, self.pages_for(tokens) - sequence.page_count)

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Give a sequence pages for so many tokens in all, those that it has included. NoRoom, and nothing taken, where there
        aren't enough."""
        self._check_live(sequence)
        if missing := self.missing(sequence, tokens):
            sequence.add(self.allocator.take(missing))

    def fork(self, sequence: Sequence) -> Sequence:
        """Another sequence of the same tokens: it shares the whole pages, and has a copy of the last one. NoRoom where there is no
        page for that."""
        self._check_live(sequence)
        whole, rest = divmod(sequence.length, self.page_tokens)
        copied = self.allocator.take(1) if rest else []
        shared = sequence.pages[:whole]
        for page in copied:
            for pool in self.pools.values():
                pool.copy_page(int(sequence.table[whole]), page)
        self.allocator.hold(shared)
        made = Sequence(list(sequence.tokens), shared + copied)
        made.indexed, made.chain = whole, sequence.chain
        self._sequences.add(made)
        return made

    def release(self, sequence: Sequence) -> None:
        """Give a sequence's pages back; whole ones stay indexed until their room is wanted. A second time does nothing."""
        if sequence.released:
            return
        sequence.released = True
        self._sequences.remove(sequence)
        self.allocator.drop(sequence.pages)

    def clear(self) -> None:
        """Forget the prefixes that nobody holds."""
        self.allocator.clear()

    def begin(self, pieces: list[tuple[Sequence, Ids[int]]]) -> PagedBatch:
        """A step over new tokens of sequences, each of which stands there once and has one at least. NoRoom, and nothing taken,
        where pages are lacking."""
        if not pieces:
            raise UsageError("a step has at least one sequence")
        if len({sequence for sequence, _ in pieces}) < len(pieces):
            raise UsageError("a sequence stands in a step twice")
        for sequence, ids in pieces:
            self._check_live(sequence)
            if not len(ids):
                raise UsageError("a sequence has no new tokens in a step")
        missing = [(sequence, self.missing(sequence, sequence.length + len(ids))) for sequence, ids in pieces]
        taken = self.allocator.take(sum(count for _, count in missing)) if any(count for _, count in missing) else []
        for sequence, count in missing:
            if count:
                sequence.add(taken[:count])
                del taken[:count]
        return PagedBatch([(sequence, len(ids)) for sequence, ids in pieces], self.pools, self.page_tokens, self.steady)

    def finish(self, pieces: list[tuple[Sequence, Ids[int]]]) -> None:
        """Count a step's new tokens, whose keys and values are in their pages now, and index the pages that they have filled."""
        for sequence, ids in pieces:
            sequence.tokens.extend(map(int, ids))
            while (sequence.indexed + 1) * self.page_tokens <= sequence.length:
                self._index(sequence, sequence.indexed)

    def _index(self, sequence: Sequence, at: int) -> None:
        before = int(sequence.table[at - 1]) if at else ROOT
        ids = np.asarray(sequence.tokens[at * self.page_tokens : (at + 1) * self.page_tokens], dtype=np.int32)
        key = ids.tobytes()
        sequence.replace(at, self.allocator.record(before, int(sequence.table[at]), key))
        sequence.indexed += 1
        if self.prefixes is not None:
            sequence.chain = self.prefixes.following(sequence.chain, key)
            if not self.prefixes.has(sequence.chain):
                self.prefixes.write(sequence.chain, at, key, self._body(int(sequence.table[at])))

    def close(self) -> None:
        """Wait until prefixes that are to be kept on disk are there."""
        if self.prefixes is not None:
            self.prefixes.close()

    def check(self) -> None:
        """AssertionError where a page is leaked, is held without being counted, or is found by what it doesn't hold."""
        self.allocator.check(sequence.pages for sequence in self._sequences)
        for sequence in self._sequences:
            assert sequence.indexed == sequence.length // self.page_tokens, "a whole page isn't indexed"
            assert sequence.page_count >= self.pages_for(sequence.length), "a sequence has fewer pages than tokens need"

    def _check_live(self, sequence: Sequence) -> None:
        if sequence not in self._sequences:
            raise UsageError("the sequence was released, or is of another cache")
