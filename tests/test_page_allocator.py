"""The books of a paged cache, under any order of what sequences do."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ktopt.cache.paged.allocator import ROOT, NoRoom, PageAllocator

PAGES = 7
KEYS = [b"a", b"b", b"c"]
"""Of few contents, so that sequences often begin alike."""


class Book(RuleBasedStateMachine):
    """Sequences are lists of pages; of each the first `whole` are full, and what they hold is known."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES, 16)
        self.sequences: list[tuple[list[int], list[bytes]]] = []

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def begin(self, keys):
        found = self.allocator.find(keys)
        self.allocator.hold(found)
        self.sequences.append((found, keys[: len(found)]))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def grow(self, data, key):
        pages, keys = data.draw(st.sampled_from(self.sequences))
        free = self.allocator.free_pages
        if len(pages) == len(keys):
            try:
                pages += self.allocator.take(1)
            except NoRoom:
                assert free == 0
                return
            assert self.allocator.free_pages == free - 1
        before = pages[len(keys) - 1] if keys else ROOT
        pages[len(keys)] = self.allocator.record(before, pages[len(keys)], key)
        keys.append(key)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, PAGES))
    def reserve(self, data, count):
        pages, _ = data.draw(st.sampled_from(self.sequences))
        if count > self.allocator.free_pages:
            with pytest.raises(NoRoom):
                self.allocator.take(count)
        else:
            pages += self.allocator.take(count)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        pages, keys = data.draw(st.sampled_from(self.sequences))
        shared = pages[: len(keys)]
        self.allocator.hold(shared)
        self.sequences.append((shared, list(keys)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        at = data.draw(st.integers(0, len(self.sequences) - 1))
        self.allocator.drop(self.sequences.pop(at)[0])

    @rule()
    def clear(self):
        self.allocator.clear()
        assert self.allocator.cached_pages == 0

    @invariant()
    def the_books_are_right(self):
        self.allocator.check(pages for pages, _ in self.sequences)
        held = {page for pages, _ in self.sequences for page in pages}
        assert self.allocator.used_pages == len(held)
        assert self.allocator.free_pages == PAGES - len(held)

    @invariant()
    def sequences_that_begin_alike_share_what_is_alike(self):
        for one, ours in self.sequences:
            for other, theirs in self.sequences:
                alike = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
                assert one[:alike] == other[:alike]
                assert not set(one[alike:]) & set(other[alike:]) or one is other


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Colliding(bytes):
    """Token ids that all have one hash."""

    def __hash__(self) -> int:
        return 1


def test_contents_whose_hashes_collide_are_told_apart():
    allocator = PageAllocator(4, 16)
    one, two = allocator.take(2)
    assert allocator.record(ROOT, one, Colliding(b"a")) == one
    assert allocator.record(ROOT, two, Colliding(b"b")) == two
    assert allocator.find([Colliding(b"a")]) == [one]
    assert allocator.find([Colliding(b"b")]) == [two]
    assert allocator.find([Colliding(b"c")]) == []


def test_the_same_tokens_after_others_are_another_page():
    allocator = PageAllocator(4, 16)
    first, second, third = allocator.take(3)
    allocator.record(ROOT, first, b"a")
    assert allocator.record(first, second, b"b") == second
    assert allocator.record(ROOT, third, b"b") == third
    assert allocator.find([b"a", b"b"]) == [first, second]
    assert allocator.find([b"b"]) == [third]


def test_a_book_that_was_tampered_with_is_found_out():
    allocator = PageAllocator(4, 16)
    pages = allocator.take(2)
    allocator.check([pages])
    with pytest.raises(AssertionError, match="holders"):
        allocator.check([pages, pages])
    with pytest.raises(AssertionError, match="holders"):
        allocator.check([])
