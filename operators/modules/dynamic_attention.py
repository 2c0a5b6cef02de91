"""KDynamicAttention: any of transformers' attention modules over a cache in blocks.

It is the original's class with another forward (see mixing.py), which runs the original's: projections, norms and rotation are the
model's own. Only its cache keeps blocks, and the attention function (attention_function.py) attends to them.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from ktopt.cache.growing import growing_layer
from ktopt.config import CacheSettings, LongContextSettings
from ktopt.implementation import BuildContext
from ktopt.operator import OperatorConfig
from ktopt.operators.dynamic import settings_of
from ktopt.operators.modules.attention_function import NAME, at_hand, register
from ktopt.operators.modules.block_cache import BlockCache, checked
from ktopt.operators.modules.block_layer import BlockLayer, block_layer
from ktopt.operators.modules.mixing import Mixed, mix

log = logging.getLogger(__name__)


class Passing:
    """What the original's forward takes for a cache: new keys and values go on as they are, and the attention function puts them
    where they belong."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values


class Blocked:
    """Attention whose cache keeps blocks. `kwargs` are the rule's; `long_context` and `kvc2` the model's settings, which count
    where a kwarg is null, None for defaults. LAYER is what stands in the cache."""

    LAYER: type[BlockLayer] = BlockLayer
    kwargs: OperatorConfig
    long_context: LongContextSettings | None
    kvc2: CacheSettings | None
    config: Any
    layer_idx: int

    def configure(self, config: OperatorConfig) -> None:
        """Take a rule's kwargs, and have the model's attention be by tiles and blocks."""
        self.kwargs, self.long_context, self.kvc2 = config, None, None
        register()
        self.config._attn_implementation = NAME

    def use_long_context(self, long_context: LongContextSettings | None, kvc2: CacheSettings | None) -> None:
        """Take a model's settings, for caches that are made from now on. KtoptError where they can't stand together."""
        before = self.long_context, self.kvc2
        self.long_context, self.kvc2 = long_context, kvc2
        try:
            checked(self.settings[0])
        except Exception:
            self.long_context, self.kvc2 = before
            raise

    @property
    def settings(self) -> tuple[LongContextSettings, CacheSettings]:
        """What it runs by."""
        return settings_of(self.kwargs, self.long_context, self.kvc2)

    def prefixes(self, cache: Any, folder: str, model_hash: str, rows: int, dims: tuple[int, int], device: torch.device) -> Any:
        """What has an empty cache of one sequence begin with blocks of an earlier prompt (block_prefix.py)."""
        from ktopt.operators.modules.block_prefix import Prefixes

        return Prefixes(cache, self.new_blocks(), folder, model_hash, rows, dims, device, self.LAYER)

    def new_blocks(self) -> BlockCache:
        """What the layers of a new cache have in common."""
        config = self.config
        rows = 1 if self.LAYER.LATENT else getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return BlockCache(*self.settings, full_layers(config), config.num_attention_heads // rows)

    def block_layer(self, cache: Any) -> BlockLayer | None:
        """The cache's layer as one that keeps blocks; None where it is of a kind that can't."""
        layers = cache.layers
        if self.layer_idx < len(layers) and type(layers[self.layer_idx]) is self.LAYER:
            return layers[self.layer_idx]  # type: ignore[no-any-return]
        held = block_layer(cache, self.layer_idx, self.new_blocks, self.LAYER)
        if held is None:
            kind = type(cache.layers[self.layer_idx]).__name__ if self.layer_idx < len(cache.layers) else type(cache).__name__
            _say(type(self).__name__, f"a cache of another kind ({kind})")
        return held


class KDynamicAttention(Blocked, Mixed, nn.Module):
    """What is mixed into the original's class."""

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        """The original's children under a class of its own. KtoptError for latent attention that isn't DeepSeek's."""
        if hasattr(original, "kv_b_proj"):
            from ktopt.operators.modules.dynamic_latent import KDynamicLatentAttention

            return KDynamicLatentAttention.build(original, context)
        made = mix(cls, original)
        made.configure(context.config)
        return made  # type: ignore[no-any-return]

    @property
    def window(self) -> int:
        """Tokens that a query sees, or 0 for all."""
        return sliding_window(self)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states (B, S, hidden) to the same shape and dtype, and None for weights. Takes what the original takes."""
        name = "cache" if kwargs.get("cache") is not None else "past_key_values"
        reason = self._unfit(hidden_states, args, kwargs.get(name))
        held = None if reason else self.cache_layer(kwargs[name])
        if held is None:
            if reason and kwargs.get(name) is not None:
                _say(type(self).__name__, reason)
            return self.origin.forward(self, hidden_states, *args, **kwargs)
        at_hand.module, at_hand.layer = self, held
        try:
            return self.origin.forward(self, hidden_states, **{**kwargs, name: Passing()})
        finally:
            at_hand.module = at_hand.layer = None

    def _unfit(self, x: torch.Tensor, args: tuple[Any, ...], cache: Any) -> str:
        """Why the cache's own keys and values are attended to, all of them, or ""."""
        if cache is None:
            return "there is no cache"
        if args:
            return "arguments given by position"
        if isinstance(x, FakeTensor) or not (x.is_cpu or x.is_cuda):
            return "an input on a device that is neither the CPU nor an NVIDIA GPU"
        if self.config._attn_implementation != NAME:
            return f"the attention implementation {self.config._attn_implementation}"
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return "a gradient is asked for"
        return "dropout in training" if self.training and getattr(self, "attention_dropout", 0.0) else ""

    def cache_layer(self, cache: Any) -> BlockLayer | None:
        """The same; None where this attention has a window, too: its cache stays short by itself, and grows in place."""
        if self.window:
            growing_layer(cache, self.layer_idx, None)
            return None
        return self.block_layer(cache)


def sliding_window(attention: Any) -> int:
    """Tokens that an attention module's queries see, or 0 for all. Some classes don't keep it: they pass on their config's."""
    if hasattr(attention, "sliding_window"):
        return int(attention.sliding_window or 0)
    names = {cls.__name__ for cls in type(attention).__mro__}
    passes_on = names & {"MistralAttention", "MixtralAttention", "OlmoeAttention", "Phi3Attention", "Starcoder2Attention"}
    return int(getattr(attention.config, "sliding_window", None) or 0) if passes_on else 0


def full_layers(config: Any) -> list[int]:
    """The layers of a model that see the whole context, by its config."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return list(range(config.num_hidden_layers))
    return [index for index, kind in enumerate(kinds) if kind == "full_attention"]


@lru_cache(maxsize=256)
def _say(name: str, reason: str) -> None:
    log.warning("%s attends to everything that its cache holds: %s", name, reason)
