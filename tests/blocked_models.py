"""Rules and layers of caches in blocks, for the tests of KDynamicAttention."""

import torch
from layer_fixtures import fused, random_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from ktopt.config import CacheSettings, LongContextSettings
from ktopt.operators.modules.block_attention import attend_blocks
from ktopt.operators.modules.block_cache import BlockCache
from ktopt.operators.modules.block_layer import BlockLayer

SMALL = {
    "kv_type": "FP32", "block_size": 8, "local_windows_len": 8, "second_select_num": 64, "max_seq_len": 512, "dense_layer_num": 0,
    "preselect_block": False, "anchor_type": "QUEST",
}  # fmt: skip
ANCHORS = ("DYNAMIC", "FIXED", "BLOCK_MEAN", "BLOCK_MAX", "QUEST", "KEY_INT4")


def rules(fuse: bool = False, **settings) -> str:
    """A rule file with KDynamicAttention in all layers, and where asked for KDecoderLayer over it."""
    kwargs = ", ".join(f"{k}: {str(v).lower() if isinstance(v, bool) else v}" for k, v in {**SMALL, **settings}.items())
    layers = '  - {match: "@model.layers.*", replace: KDecoderLayer, kwargs: {kv_dtype: float32}}\n' if fuse else ""
    return f"""
version: 1
dtype: float32
place: {{cpu: "@**"}}
rules:
{layers}  - {{match: "@model.layers.*.self_attn", replace: KDynamicAttention, kwargs: {{{kwargs}}}}}
"""


def blocked(model, fuse: bool = False, **settings):
    return fused(model, rules(fuse, **settings))


def logits_of(model, pieces, cache=None, **given):
    """The logits of pieces of a text, one after another on one cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    return torch.cat([model(piece, cache=cache, **given).logits for piece in pieces], dim=1)


def pieces_of(ids, *lengths):
    """Pieces of these lengths, then token by token."""
    at, made = 0, []
    for length in lengths:
        made.append(ids[:, at : at + length])
        at += length
    return [*made, *ids[:, at:].split(1, dim=1)]


class OneLayer:
    """A cache of one layer, or of several that are given the same keys, with all keys and values beside it."""

    def __init__(self, batch=1, heads=2, group=2, dim=16, layers=1, seed=0, **settings):
        self.settings = LongContextSettings(**{**SMALL, **settings})
        self.shared = BlockCache(self.settings, CacheSettings(cpu_memory_size_GB=0.1), range(layers))
        self.layers = [BlockLayer(self.shared, number) for number in range(layers)]
        self.random = torch.Generator().manual_seed(seed)
        self.shape, self.group = (batch, heads, dim), group
        self.keys = self.values = torch.empty(batch, heads, 0, dim)
        self.scale = dim**-0.5

    def numbers(self, *shape):
        return torch.randn(*shape, generator=self.random)

    def give(self, tokens, starts_B=None):
        """Give all layers random tokens; each layer's results (B, S, N, D), and the queries (B, N, S, D)."""
        batch, heads, dim = self.shape
        states = tuple(self.numbers(batch, heads, tokens, dim) for _ in range(2))
        self.keys, self.values = (torch.cat(pair, 2) for pair in zip((self.keys, self.values), states, strict=True))
        query = self.numbers(batch, heads * self.group, tokens, dim)
        return [attend_blocks(layer, query, states, self.scale, starts_B) for layer in self.layers], query

    def dense(self, query, seen):
        """torch's own attention (B, S, N, D) under a mask (B, N or 1, S, N of tokens)."""
        out = scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen, scale=self.scale, enable_gqa=True)
        return out.transpose(1, 2)

    def causal(self, tokens):
        """What each of the last tokens sees."""
        every = self.keys.shape[2]
        return (torch.arange(every) <= torch.arange(every - tokens, every)[:, None])[None, None]


__all__ = ["ANCHORS", "SMALL", "OneLayer", "blocked", "logits_of", "pieces_of", "random_model", "rules"]
