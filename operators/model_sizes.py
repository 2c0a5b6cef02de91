"""A model's sizes, as its config names them, for what operators hold while they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of a model; 0 for what it doesn't have.

    hidden          of a hidden state
    heads, kv_heads, head_dim   of grouped-query attention
    inner           of a dense MLP's inner layer; expert_inner and shared_inner, of an expert's and of the shared experts'
    experts, chosen   of a layer, and of them for each token
    q_rank          of latent attention's low-rank query
    vocabulary      logits of a token
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    expert_inner: int
    shared_inner: int
    experts: int
    chosen: int
    q_rank: int
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSizes:
        """From a model's config, or that of its text."""
        hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
        inner = _number(config, "intermediate_size")
        expert_inner = _number(config, "moe_intermediate_size") or inner
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=_number(config, "num_key_value_heads") or heads,
            head_dim=_number(config, "head_dim") or hidden // max(1, heads),
            inner=inner,
            expert_inner=expert_inner,
            shared_inner=_number(config, "shared_expert_intermediate_size") or expert_inner * _number(config, "n_shared_experts"),
            experts=_first(config, EXPERTS),
            chosen=_first(config, CHOSEN),
            q_rank=_number(config, "q_lora_rank"),
            vocabulary=_number(config, "vocab_size"),
        )


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((found for name in names if (found := _number(config, name))), 0)
