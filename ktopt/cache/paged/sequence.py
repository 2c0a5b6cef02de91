"""One sequence in a paged cache: its tokens, and the pages that hold their keys and values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Sequence:
    """Made, given room, and released by its PagedCache. Identity counts: two are never equal.

    tokens         ids of the tokens whose keys and values are there; not to be changed from outside
    cached_tokens  how many of them it found there when it began
    """

    __slots__ = ("_pages", "_table", "cached_tokens", "chain", "indexed", "released", "tokens")

    def __init__(self, tokens: list[int], pages: list[int]) -> None:
        self.tokens = tokens
        self.cached_tokens = len(tokens)
        self.indexed = 0  # whole pages that are in the index
        self.chain = b""  # what the last of those is known by on disk
        self.released = False
        self._table = np.empty(max(16, 2 * len(pages)), dtype=np.int32)
        self._pages = 0
        self.add(pages)

    @property
    def length(self) -> int:
        """Tokens whose keys and values are there."""
        return len(self.tokens)

    @property
    def pages(self) -> list[int]:
        """The pages that it holds, from its first token on; the last ones may still be without tokens."""
        return self.table.tolist()  # type: ignore[no-any-return]

    @property
    def table(self) -> NDArray[np.int32]:
        """The same as an array, in place until pages are added."""
        return self._table[: self._pages]

    @property
    def page_count(self) -> int:
        """How many those are."""
        return self._pages

    def add(self, pages: list[int]) -> None:
        """Take more pages for the tokens to come."""
        needed = self._pages + len(pages)
        if needed > len(self._table):
            grown = np.empty(2 * needed, dtype=np.int32)
            grown[: self._pages] = self.table
            self._table = grown
        self._table[self._pages : needed] = pages
        self._pages = needed

    def replace(self, index: int, page: int) -> None:
        """Have another page at a place."""
        self._table[index] = page
