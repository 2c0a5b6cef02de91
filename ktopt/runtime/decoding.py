"""Prefill and decode: a model's forward with its cache, and the likeliest token, one after another. `ktopt bench` times it, and
generation runs it where nothing else is asked for.

transformers' `generate` does more for every token (masks, processors, criteria), which a small model's few milliseconds feel.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

HARMLESS = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "max_new_tokens",
            "transformers_version", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "use_cache"}  # fmt: skip
"""Settings of a generation config that leave the likeliest token the likeliest."""


class Decoder:
    """A causal language model and how its forward is called, looked up once. Batches of one sequence."""

    def __init__(self, model: Any) -> None:
        names = inspect.signature(type(model).forward).parameters
        self.model = model
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.piece = prompt_piece_of(model)
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in names else {})

    def new_cache(self) -> Any:
        """An empty cache of the kind that the model's layers want."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def logits(self, ids_1T: torch.Tensor, cache: Any) -> torch.Tensor:
        """Read tokens (1, T) after those in the cache, which grows by them; the logits (1, 1, V) of the last position, which alone
        are computed."""
        logits_11V: torch.Tensor = self.model(input_ids=ids_1T, **{self._cache_name: cache}, **self._options).logits[:, -1:]
        return logits_11V

    def step(self, ids_1T: torch.Tensor, cache: Any) -> torch.Tensor:
        """The same; the likeliest next token, (1, 1), on the model's first device."""
        return self.logits(ids_1T, cache).argmax(-1).to(self.device)

    def read(self, ids_1T: torch.Tensor, cache: Any) -> torch.Tensor:
        """Read a prompt (1, T) in pieces, as the plan has them; the likeliest next token, (1, 1)."""
        from ktopt.cache.growing import expect

        expect(cache, int(cache.get_seq_length()) + ids_1T.shape[1])
        *before, last = ids_1T.split(self.piece, dim=1) if self.piece else (ids_1T,)
        for part in before:
            self.step(part, cache)
        return self.step(last, cache)

    def tokens(self, ids_1T: torch.Tensor, most: int) -> Iterator[int]:
        """The likeliest continuation of a prompt (1, T), token by token, at most so many; it knows no end."""
        cache, next_11 = self.new_cache(), None
        for _ in range(most):
            next_11 = self.read(ids_1T.to(self.device), cache) if next_11 is None else self.step(next_11, cache)
            yield int(next_11)


def prompt_piece_of(model: Any) -> int | None:
    """Tokens of a prompt that pass an optimized model at a time, as its plan says; None for the whole prompt."""
    from ktopt.working_memory import prompt_piece

    plan = getattr(model, "ktopt_plan", None)
    return None if plan is None else prompt_piece(plan)


class Prefix:
    """A cache that holds `ids` (1, T), read once, for several continuations in turn."""

    def __init__(self, decoder: Decoder, ids_1T: torch.Tensor) -> None:
        self.tokens, self._decoder, self._cache = ids_1T.shape[1], decoder, decoder.new_cache()
        if self.tokens:
            decoder.read(ids_1T, self._cache)
        for layer in getattr(self._cache, "layers", []):
            if hasattr(layer, "activate_past_recording"):  # a sliding window then keeps what is to be taken back
                layer.activate_past_recording()

    def cache(self) -> Any:
        """The cache with those tokens and no others. It may be the one handed out before, shortened; where a layer can't
        give tokens back (a recurrent state), it is a copy."""
        if not self.tokens:
            return self._decoder.new_cache()
        if not takes_back(self._cache):
            return copy.deepcopy(self._cache)
        if more := int(self._cache.get_seq_length()) - self.tokens:
            self._cache.crop(-more)
        return self._cache


def takes_back(cache: Any) -> bool:
    """Whether a cache's last tokens can be taken back."""
    layers = getattr(cache, "layers", [])
    sliding = (layer for layer in layers if getattr(layer, "is_sliding", False))
    return all(getattr(layer, "is_croppable", True) for layer in layers) and all(
        getattr(layer, "record_past", False) for layer in sliding
    )


def cache_bytes(cache: Any) -> int:
    """What a cache's tensors hold."""
    held = {}
    for layer in getattr(cache, "layers", []):
        for tensor in (*vars(layer).values(), *getattr(layer, "stored", ())):
            if isinstance(tensor, torch.Tensor):
                held[tensor.data_ptr()] = tensor.nbytes
    return sum(held.values())


def only_likeliest(model: Any, options: Mapping[str, Any]) -> bool:
    """Whether `generate` with these options takes the likeliest token every time, as `Decoder.tokens` does."""
    config: Any = getattr(model, "generation_config", None)
    if options.get("do_sample", getattr(config, "do_sample", None)) or model.config.is_encoder_decoder:
        return False
    settings = {**(config.to_diff_dict() if config else {}), **options}
    in_force = {name for name, value in settings.items() if value is not None and value is not False and not name.startswith("_")}
    return in_force <= HARMLESS
