"""DynamicScaledDotProductAttention, by KTransformers' documented constructor: attention of all layers over one cache in blocks,
called with queries, keys and values, without a model.

Legend: B sequences, S new tokens, N query heads, G heads of keys, D numbers of a head.
"""

from __future__ import annotations

from typing import Any

import torch

from ktopt.cache.blocks.statistics import CacheStatistics
from ktopt.config import CacheSettings, LongContextSettings, settings_problem
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.operators.modules.block_attention import attend_blocks
from ktopt.operators.modules.block_cache import BlockCache
from ktopt.operators.modules.block_layer import BlockLayer


class DynamicScaledDotProductAttention:
    """The arguments are KTransformers' own; `kvc2` says beside them where blocks may lie.

    max_seq_len, block_size, local_windows_len, anchor_type, anchor_num, kv_type, dense_layer_num, layer_step, token_step,
    preselect_block, preselect_block_count   as in a config's long_context; lengths are rounded up to whole blocks
    config                 the model's, which says how many layers and heads there are
    device                 where queries, keys and values are
    topk                   second_select_num
    threads_num            threads that compute: torch's own number, which this sets
    block_selection_mode   head_select_mode
    prefill_chunk_size     chunk_size
    use_attn_sparsity      False: what isn't attended to isn't measured

    KtoptError where these can't be.
    """

    def __init__(
        self,
        max_seq_len: int,
        block_size: int,
        config: Any,
        device: torch.device | str,
        local_windows_len: int,
        topk: int,
        threads_num: int,
        anchor_type: str = "DYNAMIC",
        kv_type: str = "FP16",
        dense_layer_num: int = 0,
        anchor_num: int = 1,
        block_selection_mode: str = "SHARED",
        layer_step: int = 1,
        token_step: int = 1,
        preselect_block: bool = False,
        preselect_block_count: int = 96,
        prefill_chunk_size: int = 20480,
        use_attn_sparsity: bool = False,
        *,
        kvc2: CacheSettings | None = None,
    ) -> None:
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            raise KtoptError(
                f"attention over blocks computes on the CPU and on NVIDIA GPUs, and this machine has no {device} for it"
            )
        if use_attn_sparsity:
            raise KtoptError("use_attn_sparsity: True isn't in this version: what isn't attended to isn't measured")
        given: dict[str, Any] = {
            "max_seq_len": max_seq_len, "block_size": block_size, "local_windows_len": local_windows_len, "second_select_num": topk,
            "anchor_type": anchor_type, "anchor_num": anchor_num, "kv_type": kv_type, "dense_layer_num": dense_layer_num,
            "head_select_mode": block_selection_mode, "layer_step": layer_step, "token_step": token_step,
            "preselect_block": preselect_block, "preselect_block_count": preselect_block_count, "chunk_size": prefill_chunk_size,
        }  # fmt: skip
        if problem := settings_problem("long_context", given):
            raise KtoptError(problem)
        if threads_num < 1:
            raise KtoptError(f"`threads_num` must be at least 1, not {threads_num}")
        torch.set_num_threads(threads_num)
        self.settings, self.kvc2 = LongContextSettings(**given), kvc2 or CacheSettings()
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.layer_num, self.q_head_num = text.num_hidden_layers, text.num_attention_heads
        self.kv_head_num = getattr(text, "num_key_value_heads", None) or self.q_head_num
        self.head_dim = getattr(text, "head_dim", None) or text.hidden_size // self.q_head_num
        self._begin()

    def _begin(self) -> None:
        self.blocks = BlockCache(self.settings, self.kvc2, range(self.layer_num), self.q_head_num // self.kv_head_num)
        self.layers = [BlockLayer(self.blocks, number) for number in range(self.layer_num)]

    def apply(
        self,
        layer_idx: int,
        bsz: int,
        past_len: int,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        mode: str = "prefill",
        generate_token_idx: int = -1,
    ) -> torch.Tensor:
        """Add a layer's new tokens and attend with their queries: (B, N, S, D) in the queries' dtype.

        query_states (B, S, N, D), key_states and value_states (B, S, G, D): rotated already; one token decodes, more are a prompt's
        past_len   tokens of this layer before them; fewer than there are takes the others back
        mode, generate_token_idx   told by the number of tokens and by what came before, and not needed

        UsageError for other shapes, and where `past_len` is more than there is.
        """
        self._check(layer_idx, bsz, query_states, key_states, value_states)
        held = self.layers[layer_idx]
        seen = held.get_seq_length()
        if not 0 <= past_len <= seen:
            raise UsageError(f"past_len is {past_len}, and layer {layer_idx} has seen {seen} tokens")
        if past_len < seen:
            held.crop(past_len - seen)
        states = (key_states.transpose(1, 2), value_states.transpose(1, 2))
        with torch.inference_mode():
            out = attend_blocks(held, query_states.transpose(1, 2), states, self.head_dim**-0.5, None)
        return out.transpose(1, 2).to(query_states.dtype)

    def _check(self, layer: int, batch: int, query: torch.Tensor, *states: torch.Tensor) -> None:
        if not 0 <= layer < self.layer_num:
            raise UsageError(f"layer {layer} of {self.layer_num}")
        tokens = query.shape[1] if query.dim() == 4 else 0
        heads_of = (self.q_head_num, self.kv_head_num, self.kv_head_num)
        for name, each, heads in zip(("query", "key", "value"), (query, *states), heads_of, strict=True):
            if tuple(each.shape) != (batch, tokens, heads, self.head_dim) or not tokens:
                raise UsageError(f"{name}_states are {tuple(each.shape)}, and must be ({batch}, tokens, {heads}, {self.head_dim})")

    def calc_anchor(self, cache_seqlens: int) -> None:
        """Nothing: a block's anchors are made when it leaves the local window."""

    def clear_importance(self, cache_seqlens: int) -> None:
        """Nothing: it is forgotten with the next prompt."""

    def clear_kvcache(self, cache_seqlens: int = 0) -> None:
        """Forget all tokens, and begin anew."""
        self.blocks.close()
        self._begin()

    @property
    def statistics(self) -> CacheStatistics | None:
        """Of the tiers; None before the first token."""
        return self.blocks.statistics

    def close(self) -> None:
        """Give memory and files back."""
        self.blocks.close()
