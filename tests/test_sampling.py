"""A token is chosen as transformers' own processors would have it chosen, whoever else is in the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ktopt.engine.request import Sampling
from ktopt.engine.sampling import Row, choose, defaults_of, settled

OPEN = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
PROMPT = [3, 5, 5, 17]
WORDS = 400


def row(index: int = 0, prompt: Any = PROMPT, grammar: Any = None, **settings: Any) -> Row:
    return Row(settled(Sampling(**settings), OPEN), prompt, index, grammar)


def logits_of(seed: int, rows: int = 1, words: int = WORDS, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, words, generator=torch.Generator().manual_seed(seed)) * spread


def chances_of(made: Row, logits_V: torch.Tensor) -> np.ndarray:
    """The chance of each word, found by walking through the random numbers from 0 to 1."""
    changed_V = logits_V.clone().numpy()
    made.change(changed_V)
    chances_V = (torch.from_numpy(changed_V) / made.sampling.temperature).softmax(-1).numpy()
    counts, steps = np.zeros(len(chances_V)), 2_000
    for step in range(steps):
        made._random = type("Fixed", (), {"random": lambda self, at=step: (at + 0.5) / steps})()
        counts[made.draw(chances_V)] += 1
    return counts / steps


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_k": 1},
        {"top_k": WORDS + 5},
        {"top_p": 0.8},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7, "top_p": 0.5},
    ],
)
def test_chances_are_those_of_transformers_processors(settings: dict[str, Any], spread: float) -> None:
    logits_V = logits_of(1, spread=spread)[0]
    warpers = LogitsProcessorList()
    if "repetition_penalty" in settings:
        warpers.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    warpers.append(TemperatureLogitsWarper(float(settings.get("temperature", 1.0))))
    for name, make in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in settings:
            warpers.append(make(settings[name]))
    wanted_V = warpers(torch.tensor([PROMPT]), logits_V[None].clone())[0].softmax(-1).numpy()
    found_V = chances_of(row(**settings), logits_V)
    assert np.abs(found_V - wanted_V).max() < 1e-3
    assert not found_V[wanted_V == 0].any()


def test_words_as_likely_as_the_last_of_top_k_stay_in() -> None:
    logits_V = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0])
    wanted_V = TopKLogitsWarper(2)(torch.tensor([[0]]), logits_V[None].clone())[0].softmax(-1).numpy()
    assert np.abs(chances_of(row(top_k=2), logits_V) - wanted_V).max() < 1e-3
    assert (wanted_V > 0).sum() == 4


def test_the_likeliest_is_taken_at_temperature_0_and_close_to_it() -> None:
    logits_NV = logits_of(2, rows=3)
    rows = [row(temperature=0.0), row(temperature=1e-9), row(temperature=0.0, top_k=3, seed=1)]
    assert [choice.token for choice in choose(logits_NV, rows)] == logits_NV.argmax(-1).tolist()


def test_frequency_and_presence_penalties_count_the_answer_alone() -> None:
    made = row(frequency_penalty=0.5, presence_penalty=0.25)
    for token in (7, 7, 9):
        made.took(token)
    logits_V = logits_of(3)[0]
    changed_V = logits_V.clone().numpy()
    made.change(changed_V)
    wanted_V = logits_V.clone()
    wanted_V[7] -= 2 * 0.5 + 0.25
    wanted_V[9] -= 0.5 + 0.25
    assert np.allclose(changed_V, wanted_V.numpy())


def test_counts_grow_beyond_their_first_room() -> None:
    made = row(frequency_penalty=1.0, repetition_penalty=2.0)
    for token in [*range(300), 299]:
        made.took(token)
    changed_V = torch.ones(WORDS).numpy()
    made.change(changed_V)
    assert changed_V[:300].tolist() == pytest.approx([0.5 - 1] * 299 + [0.5 - 2])
    assert set(changed_V[300:].tolist()) == {1.0}


def test_a_bias_moves_a_logit() -> None:
    logits_NV = torch.zeros(2, 8)
    rows = [row(temperature=0.0, logit_bias=((5, 2.0), (3, 1.0))), row(temperature=0.0, logit_bias=((0, -100.0),))]
    assert [choice.token for choice in choose(logits_NV, rows)] == [5, 1]


def test_a_seed_gives_the_same_tokens_alone_and_in_company() -> None:
    def tokens(company: int) -> list[int]:
        mine, others = row(seed=11, top_p=0.9, temperature=1.2), [row(seed=at, top_k=20) for at in range(company)]
        made = []
        for step in range(30):
            logits_NV = torch.cat((logits_of(step), logits_of(step + 100, rows=company)))
            made.append(choose(logits_NV, [mine, *others])[0].token)
        return made

    assert tokens(0) == tokens(5)
    assert len(set(tokens(0))) > 5


def test_choices_and_seeds_differ_and_any_whole_number_is_a_seed() -> None:
    def tokens(**settings: Any) -> list[int]:
        made = row(**settings)
        return [choose(logits_of(step), [made])[0].token for step in range(20)]

    seen = [tokens(seed=1), tokens(seed=1, index=1), tokens(seed=2), tokens(seed=-1), tokens(seed=1 << 70), tokens(), tokens()]
    assert len({tuple(each) for each in seen}) == len(seen)


def test_logprobs_are_the_models_own_whatever_is_done_to_the_logits() -> None:
    logits_NV = logits_of(5, rows=3)
    rows = [row(temperature=0.0, logprobs=3), row(temperature=0.0), row(temperature=0.0, logprobs=0, logit_bias=((4, 100.0),))]
    told, none, biased = choose(logits_NV, rows)
    wanted_NV = logits_NV.log_softmax(-1)
    values, words = wanted_NV[0].topk(3)
    assert told.token == told.logprob.token_id == words[0]
    assert [word for word, _ in told.logprob.top] == words.tolist()
    assert [value for _, value in told.logprob.top] == pytest.approx(values.tolist())
    assert none.logprob is None
    assert biased.token == 4
    assert biased.logprob.logprob == pytest.approx(float(wanted_NV[2, 4]))
    assert biased.logprob.top == ()


class Only:
    """A grammar of a few words."""

    complete = False

    def __init__(self, *words: int) -> None:
        self.words, self.taken = words, []

    def forbidden(self) -> np.ndarray:
        return np.array([word not in self.words for word in range(WORDS - 10)])

    def take(self, token: int) -> None:
        self.taken.append(token)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.3}, {"top_k": 2}, {}])
def test_a_grammar_leaves_its_words_alone(settings: dict[str, Any]) -> None:
    grammar = Only(8, 250)
    made = row(grammar=grammar, **settings)
    seen = [choose(logits_of(seed), [made])[0].token for seed in range(20)]
    assert set(seen) == {8, 250}


def test_logits_that_are_no_numbers_and_grammars_without_a_word_give_no_token() -> None:
    logits_NV = logits_of(6, rows=4)
    logits_NV[1, 7] = math.nan
    logits_NV[2, 9] = math.inf
    rows = [row(), row(temperature=0.0), row(), row(grammar=Only())]
    found = choose(logits_NV, rows)
    assert found[0] is not None
    assert found[1:] == [None, None, None]


def test_what_is_chosen_leaves_the_models_logits_as_they_were() -> None:
    logits_NV = logits_of(7, rows=2)
    before = logits_NV.clone()
    choose(logits_NV, [row(logit_bias=((1, 50.0),)), row(temperature=0.5)])
    assert torch.equal(logits_NV, before)


@pytest.mark.parametrize(
    ("config", "temperature", "top_k"),
    [
        ({}, 0.0, 0),
        ({"temperature": 0.6, "do_sample": False}, 0.0, 0),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, 0.6, 20),
        ({"do_sample": True}, 1.0, 0),
    ],
)
def test_what_a_request_leaves_open_is_as_the_generation_config_has_it(
    config: dict[str, Any], temperature: float, top_k: int
) -> None:
    model = type("Model", (), {"generation_config": GenerationConfig(**config)})()
    found = settled(Sampling(seed=3), defaults_of(model))
    assert (found.temperature, found.top_k, found.seed) == (temperature, top_k, 3)
    assert settled(Sampling(temperature=1.5, top_k=0), defaults_of(model)).temperature == 1.5
