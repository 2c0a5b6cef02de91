"""DynamicScaledDotProductAttention, by KTransformers' constructor, against torch's own attention."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from ktopt.diagnostics import KtoptError, UsageError
from ktopt.operators.dynamic_attention import DynamicScaledDotProductAttention

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = LlamaConfig(
    hidden_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=64, vocab_size=32
)
DOCUMENTED = (
    "max_seq_len", "block_size", "config", "device", "local_windows_len", "topk", "threads_num", "anchor_type", "kv_type",
    "dense_layer_num", "anchor_num", "block_selection_mode", "layer_step", "token_step", "preselect_block",
    "preselect_block_count", "prefill_chunk_size", "use_attn_sparsity",
)  # fmt: skip
"""The constructor's parameters in KTransformers, in order."""


def made(**changes: Any) -> DynamicScaledDotProductAttention:
    arguments = {
        "max_seq_len": 512, "block_size": 16, "config": CONFIG, "device": "cpu", "local_windows_len": 32, "topk": 32,
        "threads_num": 1, "kv_type": "FP32", "prefill_chunk_size": 40,
    }  # fmt: skip
    return DynamicScaledDotProductAttention(**{**arguments, **changes})


def states(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (1, tokens, 4, 32), keys and values (1, tokens, 2, 32)."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, tokens, heads, 32, generator=random) for heads in (4, 2, 2))  # type: ignore[return-value]


def expected(parts: list[Any]) -> torch.Tensor:
    """torch's attention over all parts: (1, heads, tokens, 32)."""
    query, key, value = (torch.cat([part[which] for part in parts], dim=1).transpose(1, 2) for which in range(3))
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def test_the_constructor_has_the_documented_parameters_in_order() -> None:
    found = inspect.signature(DynamicScaledDotProductAttention.__init__).parameters
    assert tuple(found)[1 : len(DOCUMENTED) + 1] == DOCUMENTED
    defaults = {name: found[name].default for name in DOCUMENTED[7:]}
    assert defaults == dict(
        zip(DOCUMENTED[7:], ("DYNAMIC", "FP16", 0, 1, "SHARED", 1, 1, False, 96, 20480, False), strict=True)
    )  # fmt: skip


def test_a_prompt_in_parts_and_tokens_after_it_are_attended_to_as_torch_does() -> None:
    attention, parts = made(), [states(100, 0), states(30, 1), *(states(1, 2 + at) for at in range(20))]
    for layer in range(2):
        seen, outs = 0, []
        for number, part in enumerate(parts):
            mode = "generate" if part[0].shape[1] == 1 else "prefill"
            outs.append(attention.apply(layer, 1, seen, *part, mode=mode, generate_token_idx=number - 2))
            seen += part[0].shape[1]
        torch.testing.assert_close(torch.cat(outs, dim=2), expected(parts), rtol=1e-4, atol=1e-5)
    assert attention.statistics is not None


def test_a_past_that_is_shorter_than_what_was_seen_takes_tokens_back() -> None:
    attention, first, other = made(), states(60, 0), states(10, 1)
    attention.apply(0, 1, 0, *first)
    out = attention.apply(0, 1, 25, *other)
    kept = tuple(each[:, :25] for each in first)
    torch.testing.assert_close(out, expected([kept, other])[:, :, 25:], rtol=1e-4, atol=1e-5)


def test_half_precision_comes_back_as_it_went_in() -> None:
    part = tuple(each.half() for each in states(20, 0))
    assert made(kv_type="FP16").apply(0, 1, 0, *part).dtype is torch.float16


def test_a_cleared_cache_begins_anew() -> None:
    attention, part = made(), states(50, 0)
    attention.apply(0, 1, 0, *part)
    attention.clear_kvcache(50)
    torch.testing.assert_close(attention.apply(0, 1, 0, *part), expected([part]), rtol=1e-4, atol=1e-5)
    attention.close()


@pytest.mark.parametrize(("changes", "said"), [
    ({"anchor_type": "QUEST"}, "needs `anchor_num: 2`, not 1"),
    ({"anchor_type": "BEST"}, "`anchor_type` must be one of"),
    ({"block_size": 0}, "at least 1, not 0"),
    ({"device": "mps"}, "has no mps for it"),
    ({"use_attn_sparsity": True}, "use_attn_sparsity"),
    ({"threads_num": 0}, "`threads_num` must be at least 1"),
    ({"preselect_block": True}, "the cache holds 32"),
])  # fmt: skip
def test_arguments_that_can_not_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(KtoptError, match=said):
        made(**changes)


@pytest.mark.parametrize(("call", "said"), [
    (lambda a: a.apply(2, 1, 0, *states(5, 0)), "layer 2 of 2"),
    (lambda a: a.apply(0, 1, 3, *states(5, 0)), "past_len is 3, and layer 0 has seen 0 tokens"),
    (lambda a: a.apply(0, 1, 0, *states(5, 0)[::-1]), r"query_states are \(1, 5, 2, 32\), and must be \(1, tokens, 4, 32\)"),
    (lambda a: a.apply(0, 1, 0, *states(513, 0)), "513"),
])  # fmt: skip
def test_calls_that_can_not_be_are_refused(call: Any, said: str) -> None:
    with pytest.raises((UsageError, KtoptError), match=said):
        call(made())
