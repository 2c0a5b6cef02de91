"""A model that is a function of the tokens so far, and a paged cache of books alone, for engines to run thousands of steps with."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from apply_fixtures import make_tokenizer

from ktopt.cache.paged import PagedCache
from ktopt.cache.paged.allocator import PageAllocator
from ktopt.engine.batch import BatchEngine
from ktopt.engine.events import Event, Failed, Finished, Piece
from ktopt.engine.request import Request, Sampling
from ktopt.engine.sampling import Row, choose

WORDS = 320
TOKENIZER = make_tokenizer()


class BooksOnly(PagedCache):
    """A paged cache without memory, whose pages may be small."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        with patch("ktopt.cache.paged.cache.ModelCall"), patch("ktopt.cache.paged.cache.shapes_of", return_value={}):
            super().__init__(None, tokens=16, page_tokens=16)
        self.page_tokens, self.allocator = page_tokens, PageAllocator(pages, page_tokens)


def logits_after(tokens: list[int]) -> torch.Tensor:
    """Logits (V) that any token changes."""
    seed = hash(tuple(tokens)) & 0xFFFFFFFF
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(WORDS).astype(np.float32) * 3)


class FakeModel:
    """What engines ask of a model, and `forward`, which stands for forward_paged: `faults` holds the steps that fail."""

    config = None
    generation_config = SimpleNamespace(eos_token_id=None, to_diff_dict=dict)

    def __init__(self) -> None:
        self.steps, self.faults, self.shapes = 0, set[int](), list[list[int]]()
        self.gate = threading.Event()
        self.gate.set()

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(num_embeddings=WORDS)

    def forward(self, model: Any, cache: PagedCache, pieces: list[Any]) -> torch.Tensor:
        self.gate.wait(20)
        self.steps += 1
        if self.steps in self.faults:
            raise RuntimeError("a fault in the kernel")
        cache.begin(pieces)
        logits_NV = torch.stack([logits_after([*sequence.tokens, *ids]) for sequence, ids in pieces])
        self.shapes.append([len(ids) for _, ids in pieces])
        cache.finish(pieces)
        return logits_NV


def make_engine(monkeypatch: pytest.MonkeyPatch, pages: int = 64, page_tokens: int = 4, **settings: Any) -> BatchEngine:
    """A batch engine on the fake model, with a context of 4,096."""
    model = FakeModel()
    monkeypatch.setattr("ktopt.engine.batch.forward_paged", model.forward)
    return BatchEngine(model, TOKENIZER, BooksOnly(pages, page_tokens), **{"max_tokens": 4096, **settings})


def alone(request: Request) -> list[list[int]]:
    """The tokens of each choice, made by the same sampler without an engine."""
    made = []
    for index in range(request.n):
        row, tokens = Row(settled_of(request.sampling), request.prompt_ids, index), list(request.prompt_ids)
        for _ in range(request.max_tokens):
            choice = choose(logits_after(tokens)[None], [row])[0]
            assert choice is not None
            row.took(choice.token)
            tokens.append(choice.token)
            if choice.token in (*request.stop_ids, TOKENIZER.eos_token_id):
                break
        made.append(tokens[len(request.prompt_ids) :])
    return made


def settled_of(sampling: Sampling) -> Sampling:
    from ktopt.engine.sampling import defaults_of, settled

    return settled(sampling, defaults_of(FakeModel()))


def tokens_of(events: list[Event], index: int = 0) -> list[int]:
    """The tokens of a choice, and the one that stopped it."""
    tokens = [token for event in events if isinstance(event, Piece) and event.index == index for token in event.token_ids]
    ends = [event.stop for event in events if isinstance(event, Finished) and event.index == index and isinstance(event.stop, int)]
    return tokens + ends


def last(events: list[Event]) -> Any:
    """How it ended."""
    assert isinstance(events[-1], Finished | Failed)
    return events[-1]
