"""Which pages of a paged cache are whose: pure bookkeeping, without memory of its own.

A page holds the keys and values of `page_tokens` tokens, in every layer under the same number. It is empty, held by sequences
(counted), or indexed and held by nobody: then its prefix is found by later prompts, until its room is wanted.

The index is a tree. A whole page is found by the page before it and by its own token ids, which are compared, so that what is found
stands after exactly these tokens. A page is taken out of the tree only when none stands below it: its number is its children's key.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from ktopt.diagnostics import KtoptError

ROOT = -1
"""Stands before the first page of every sequence."""


class NoRoom(KtoptError):
    """Fewer pages can be had than are needed."""

    def __init__(self, needed: int, free: int, pages: int, page_tokens: int) -> None:
        self.needed, self.free, self.pages, self.page_tokens = needed, free, pages, page_tokens
        super().__init__(
            f"the paged cache has room for {free * page_tokens} more tokens ({free} of {pages} pages of {page_tokens}), and "
            f"{needed * page_tokens} are needed: make it larger, or let other sequences end"
        )


class PageAllocator:
    """The books of `pages` pages."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.pages, self.page_tokens = pages, page_tokens
        self._holders = [0] * pages
        self._empty = list(range(pages))[::-1]
        self._index: dict[tuple[int, bytes], int] = {}
        self._keys: dict[int, tuple[int, bytes]] = {}  # of indexed pages
        self._children = [0] * pages
        self._idle = 0  # indexed pages that nobody holds
        self._used = [0] * pages  # when each was last dropped
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []  # (when, page): heap of idle pages without children, and of some that were

    @property
    def free_pages(self) -> int:
        """Pages that can be had: empty ones, and indexed ones that nobody holds."""
        return len(self._empty) + self._idle

    @property
    def cached_pages(self) -> int:
        """Indexed pages that nobody holds."""
        return self._idle

    @property
    def used_pages(self) -> int:
        """Pages that are held."""
        return self.pages - self.free_pages

    def take(self, count: int) -> list[int]:
        """So many pages, each held once; prefixes that were used longest ago make room. NoRoom, and nothing taken, where there are
        fewer."""
        if count > self.free_pages:
            raise NoRoom(count, self.free_pages, self.pages, self.page_tokens)
        while len(self._empty) < count:
            self._evict()
        taken = [self._empty.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The indexed pages of a prompt whose whole pages have these token ids, from the first on as far as they are there."""
        found: list[int] = []
        for key in keys:
            page = self._index.get((found[-1] if found else ROOT, key))
            if page is None:
                break
            found.append(page)
        return found

    def hold(self, pages: Sequence[int]) -> None:
        """Note one more holder of each."""
        for page in pages:
            if self._holders[page] == 0:
                self._idle -= 1
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Note one holder less of each page of a sequence, from its first on."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page not in self._keys:
                self._empty.append(page)
                continue
            self._idle += 1
            self._clock += 1
            self._used[page] = self._clock
            self._offer(page)

    def record(self, before: int, page: int, key: bytes) -> int:
        """Index a held page that has become whole, behind `before`. Where another page holds the same already, the caller's hold
        goes over to that one, which is the answer; else the page is."""
        there = self._index.get((before, key))
        if there is not None:
            self.hold([there])
            self.drop([page])
            return there
        self._index[before, key] = page
        self._keys[page] = (before, key)
        if before != ROOT:
            self._children[before] += 1
        return page

    def clear(self) -> None:
        """Forget all prefixes that nobody holds."""
        while self._idle:
            self._evict()

    def _offer(self, page: int) -> None:
        """Note an idle page as one that can be evicted, if it can."""
        if self._children[page]:
            return
        if len(self._leaves) > 4 * self.pages + 64:
            self._leaves = sorted(set(filter(self._is_leaf, self._leaves)))
        heapq.heappush(self._leaves, (self._used[page], page))

    def _is_leaf(self, entry: tuple[int, int]) -> bool:
        """Whether an entry of the heap still tells the truth."""
        when, page = entry
        return page in self._keys and not self._holders[page] and not self._children[page] and self._used[page] == when

    def _evict(self) -> None:
        """Empty the idle page that was used longest ago, of those that none stands below."""
        while not self._is_leaf(entry := heapq.heappop(self._leaves)):
            pass
        page = entry[1]
        key = self._keys.pop(page)
        del self._index[key]
        self._idle -= 1
        self._empty.append(page)
        before = key[0]
        if before != ROOT:
            self._children[before] -= 1
            if not self._holders[before]:
                self._offer(before)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """AssertionError unless the books agree with the pages that sequences hold, and with themselves."""
        count = Counter(page for pages in held for page in pages)
        for page in range(self.pages):
            assert self._holders[page] == count[page], (
                f"page {page} has {self._holders[page]} holders by the books, and {count[page]}"
            )
        empty, indexed = set(self._empty), set(self._keys)
        assert len(empty) == len(self._empty), "a page is empty twice"
        assert not empty & (indexed | set(count)), "an empty page is indexed or held"
        assert empty | indexed | set(count) == set(range(self.pages)), "a page is neither empty nor indexed nor held"
        assert self._idle == len(indexed - set(count)), f"{self._idle} pages are idle by the books"
        assert {page: key for key, page in self._index.items()} == self._keys, "the index and its pages differ"
        children = Counter(before for before, _ in self._index)
        assert children.keys() <= indexed | {ROOT}, "a page is indexed behind one that isn't"
        for page in range(self.pages):
            assert self._children[page] == children[page], f"page {page} has {self._children[page]} children by the books"
        for page, (before, _) in self._keys.items():
            assert before == ROOT or count[before] >= min(count[page], 1), f"page {page} is held, and {before} before it isn't"
        leaves = {page for when, page in self._leaves if self._is_leaf((when, page))}
        assert leaves == {page for page in indexed - set(count) if not children[page]}, "a page that could make room isn't known"
