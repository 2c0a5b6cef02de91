"""A model as a paged cache runs it: how its forward is called, what its layers keep, and whether they can be paged at all."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ktopt.cache.paged.attention import paged_attention
from ktopt.cache.paged.batch import PagedBatch, Probe
from ktopt.cache.paged.pools import LayerShape
from ktopt.diagnostics import KtoptError

PAGED_LAYERS = {"full_attention", "sliding_attention", "attention", "mlp", "dense", "sparse", "moe"}
"""What a config may say of a layer's attention."""


class ModelCall:
    """A causal language model and how it is called, looked up once."""

    def __init__(self, model: Any) -> None:
        names = inspect.signature(type(model).forward).parameters
        self.model = model
        self.device: torch.device = model.get_input_embeddings().weight.device
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps = "logits_to_keep" in names
        found = (getattr(module, "config", None) for module in model.modules())
        self.configs = list({id(each): each for each in found if hasattr(each, "_attn_implementation")}.values())

    @torch.inference_mode()
    def logits(self, batch: PagedBatch, ids: list[int], positions: list[int], rows: list[int]) -> torch.Tensor:
        """Run a step: the logits (N, V) of some rows, float32."""
        ids_1S, positions_1S = (torch.tensor([each], device=self.device) for each in (ids, positions))
        wanted = torch.tensor(rows)
        options: dict[str, Any] = {self._cache_name: batch, "use_cache": True}
        if self._keeps:
            options["logits_to_keep"] = wanted.to(self.device)
        with paged_attention(self.configs, batch):
            logits_1NV = self.model(input_ids=ids_1S, position_ids=positions_1S, **options).logits
        logits_NV: torch.Tensor = logits_1NV[0] if self._keeps else logits_1NV[0, wanted.to(logits_1NV.device)]
        return logits_NV.float()


def cannot_page(model: Any) -> str:
    """Why a model's layers can't keep their tokens in pages, or "". What only shows when they run isn't known here."""
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or not model.can_generate():
        return f"{type(model).__name__} isn't a causal language model"
    kinds = set(getattr(config, "layer_types", None) or ()) - PAGED_LAYERS
    if kinds or getattr(model, "_is_stateful", False):
        return f"{type(model).__name__} has layers ({', '.join(sorted(kinds)) or 'recurrent'}) whose state isn't kept by tokens"
    known: set[int] = set()
    for module in model.modules():
        if getattr(module, "PAGED", False):
            known.update(map(id, module.modules()))
        if hasattr(module, "block_layer"):
            return f"{type(module).__name__} keeps blocks for long contexts (mode long_context), one sequence at a time"
        if hasattr(module, "kv_b_proj") and id(module) not in known:
            return f"{type(module).__name__} is latent attention as transformers has it: KDeepseekV2Attention or KDecoderLayer can"
    return ""


def shapes_of(call: ModelCall, page_tokens: int) -> dict[int, LayerShape]:
    """What each layer of a model keeps of a token, by its number. KtoptError where they can't be paged."""
    if reason := cannot_page(call.model):
        raise KtoptError(f"this model can't be served from a paged cache: {reason}")
    probe = Probe(page_tokens)
    try:
        call.logits(probe, [0], [0], [0])
    except (AttributeError, NotImplementedError, IndexError) as error:
        raise KtoptError(
            f"this model can't be served from a paged cache: {type(call.model).__name__} wants more of a cache ({error})"
        ) from error
    expected = call.model.config.get_text_config().num_hidden_layers
    if sorted(probe.shapes) != list(range(expected)):
        raise KtoptError(f"this model can't be served from a paged cache: {len(probe.shapes)} of its {expected} layers keep tokens")
    return dict(sorted(probe.shapes.items()))
