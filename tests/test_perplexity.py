"""A text is as likely under the quantised CPU plan as under a float model of the same weights.

benchmarks/perplexity.py measures it on thousands of tokens. A text of some hundred is short enough for a test, and chance plays a
part: the likelihoods are compared token by token, which tells how large that part is (the standard error of their mean difference).
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import ktopt
from ktopt.kernels import cpu
from ktopt.source import SourceFile
from ktopt.weights.tokenizer import find_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = Path(__file__).resolve().parents[1] / "rules" / "smollm2" / "cpu.yaml"
FLOAT = SourceFile("float.yaml", "version: 1\ndtype: float32\nrules: [{match: '@**', replace: default}]\n")
TOKENS = 768
WITHIN = 0.005


@pytest.fixture(scope="module")
def text(smollm2: Path) -> torch.Tensor:
    return torch.tensor([find_tokenizer((smollm2,)).encode(inspect.getsource(argparse)[:8000])[:TOKENS]])


@pytest.fixture(scope="module")
def reference(smollm2: Path, text: torch.Tensor) -> torch.Tensor:
    return losses(ktopt.apply(FLOAT, smollm2, smollm2), text, TOKENS)


@torch.inference_mode()
def losses(model: Any, ids_1T: torch.Tensor, at_once: int) -> torch.Tensor:
    """The negative log-likelihood of each token after the first, of a text that is read some tokens at a time: (T - 1)."""
    cache, pieces = DynamicCache(config=model.config), []
    for piece in ids_1T[:, :-1].split(at_once, dim=1):
        pieces.append(model(piece, cache=cache, use_cache=True).logits[0].log_softmax(-1))
    return -torch.cat(pieces).gather(1, ids_1T[0, 1:, None])[:, 0].double()


@pytest.mark.parametrize("at_once", [TOKENS, 8])
def test_perplexity_is_that_of_the_float_model(smollm2: Path, text: torch.Tensor, reference: torch.Tensor, at_once: int) -> None:
    if not cpu.available()[0]:
        pytest.skip(cpu.available()[1])
    worse = losses(ktopt.apply(RULES, smollm2, smollm2), text, at_once) - reference
    mean, chance = float(worse.mean()), float(worse.std()) / len(worse) ** 0.5
    assert chance < WITHIN
    assert abs(mean) < WITHIN + 2 * chance
