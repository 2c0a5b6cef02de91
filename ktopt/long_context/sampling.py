"""Choosing a token of its logits, by a model's generation config and what is asked beside it: transformers' own warpers.

Legend: N tokens so far, V words of the vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

log = logging.getLogger(__name__)

Choose = Callable[[torch.Tensor, torch.Tensor], int]
OTHERS = ("repetition_penalty", "no_repeat_ngram_size", "typical_p", "num_beams", "bad_words_ids", "suppress_tokens")
"""What a generation config may ask and nothing here does."""


def chooser(model: Any, options: Mapping[str, Any]) -> Choose | None:
    """What makes a token of the tokens so far (1, N) and their logits (1, V); None where it is the likeliest. `options` go before
    the model's generation config, as in transformers' `generate`."""
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    config = getattr(model, "generation_config", None)
    settings = {**(config.to_diff_dict() if config is not None else {}), **options}
    if left := [name for name in OTHERS if settings.get(name) not in (None, 1, 1.0, 0)]:
        log.warning("the model's generation config asks for %s, which long contexts are generated without", ", ".join(left))
    if not settings.get("do_sample"):
        return None
    warpers = LogitsProcessorList()
    makers: dict[str, Any] = {
        "temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper,
    }  # fmt: skip
    for name, make in makers.items():
        value = settings.get(name)
        if value is not None and not (name == "top_p" and value >= 1) and not (name in ("top_k", "min_p") and not value):
            warpers.append(make(int(value) if name == "top_k" else float(value)))

    def choose(ids_1N: torch.Tensor, logits_1V: torch.Tensor) -> int:
        scores_1V = warpers(ids_1N, logits_1V.float())
        return int(torch.multinomial(scores_1V.softmax(-1), 1))

    return choose
