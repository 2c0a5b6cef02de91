"""Latent caches in Q8_0: the numbers that gguf's own quantiser makes, logits within its error of a float cache, the same through
the fused layer, the bytes that a plan counts, and what is refused.
"""

from __future__ import annotations

import copy
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from layer_fixtures import assert_no_fallback, fused, random_model
from test_latent_attention import PROMPT, logits, original, replaced
from transformers import DynamicCache

import ktopt
from ktopt.cache import q8_0
from ktopt.cache.latent import LatentLayer, latent_cache
from ktopt.diagnostics import KtoptError
from ktopt.kernels import cpu
from ktopt.operators.modules.attention_mla import KDeepseekV2Attention
from ktopt.source import SourceFile
from ktopt.working_memory import working_memory

SIZES: dict[str, Any] = {"kv_lora_rank": 48, "qk_rope_head_dim": 16}
ERROR = 1.5e-2
"""Of the logits of these models, which are close in norm to what half a step of 1/127 makes."""
V3_RULES = """
- match: {{class: transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention}}
  replace: {{class: KDeepseekV2Attention, kwargs: {{generate_device: {device}, kv_dtype: {kv_dtype}}}}}
"""
LAYERS = """
version: 1
dtype: float32
place: {{cpu: "@**"}}
rules:
  - {{match: "@model.layers.*.self_attn", replace: KDeepseekV2Attention, kwargs: {{kv_dtype: q8_0, absorb_for_prefill: auto}}}}
  - {{match: "@model.layers.*", replace: KDecoderLayer, kwargs: {{kv_dtype: {layer}}}}}
"""


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)) * scale


def test_blocks_are_those_of_gguf_and_read_as_gguf_reads_them() -> None:
    x = random(5, 96)
    x[2, 32:64] = 0
    stored = q8_0.quantized(x)
    expected = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert stored.shape == (5, q8_0.stored_bytes(96))
    assert np.array_equal(stored.numpy(), expected)
    read = gguf.quants.dequantize(expected, gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(q8_0.numbers_of(stored, torch.float32), torch.from_numpy(read))


def test_numbers_that_no_scale_reaches_and_tokens_of_other_sizes_are_refused() -> None:
    with pytest.raises(KtoptError, match="is beyond Q8_0: keep the cache in bfloat16 or float32"):
        q8_0.quantized(torch.full((1, 32), 1e7))
    held = LatentLayer(kept="Q8_0")
    with pytest.raises(KtoptError, match="blocks of 32 numbers, which 40 numbers of a token aren't"):
        held.start(1, 32, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(KtoptError, match="or Q8_0, not Q4_0"):
        LatentLayer(kept="Q4_0")


@pytest.mark.parametrize("absorb", [True, False, "auto"])
@pytest.mark.parametrize("decode_cache", ["latent", "expanded"])
@pytest.mark.parametrize("name", ["v2", "v3"])
def test_logits_are_within_the_error_of_eight_bits(name: str, absorb: Any, decode_cache: str) -> None:
    model = original(name, **SIZES)
    ours = replaced(model, kv_dtype="q8_0", absorb_for_prefill=absorb, decode_cache=decode_cache, page_size=8, chunk_size=11)
    expected, cache = logits(model, PROMPT), DynamicCache(config=model.config)
    found = torch.cat([logits(ours, piece, cache) for piece in PROMPT.split([17, 5, 1, 1, 14, 1, 1], dim=1)], dim=1)
    assert 0 < (found - expected).norm() < ERROR * expected.norm()
    held: Any = cache.layers[0]
    assert (held.kind, held.dtype, held.pool.pages_GTW.dtype) == ("Q8_0", torch.float32, torch.uint8)
    assert held.pool.pages_GTW.shape[1:] == (8, 68)


@pytest.mark.skipif(not cpu.available()[0], reason="needs the CPU kernels")
def test_decoding_by_the_kernel_reads_the_same_numbers_as_torch(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = original("v3", **SIZES)
    ours, cache = replaced(model, kv_dtype="q8_0", absorb_for_prefill=True), DynamicCache()
    logits(ours, PROMPT[:, :38], cache)
    other = copy.deepcopy(cache)
    found = logits(ours, PROMPT[:, 38:], cache)
    monkeypatch.setattr(KDeepseekV2Attention, "_by_kernel", lambda *_: None)
    by_torch = logits(ours, PROMPT[:, 38:], other)
    tolerance = 1e-2 if "bf16" in isa else 1e-4
    assert (found - by_torch).norm() < tolerance * by_torch.norm()


def test_a_cache_in_eight_bits_is_cut_copied_and_reordered_as_any_other() -> None:
    ours = replaced(original("v3", **SIZES), kv_dtype="q8_0", page_size=4)
    both = torch.cat((PROMPT[:, :22], PROMPT[:, 9:31]))
    cache = DynamicCache()
    logits(ours, both, cache)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([1, 1]))
    held: Any = copy.deepcopy(cache)
    found = logits(ours, torch.cat((PROMPT[:, 28:31], PROMPT[:, :3])), cache)
    expected = logits(ours, torch.cat((both[1:, :19], PROMPT[:, 28:31]), dim=1), DynamicCache())[:, 19:]
    assert (found[:1] - expected).norm() < ERROR * expected.norm()
    assert held.get_seq_length() == 19
    assert (logits(ours, PROMPT[:, 28:31].repeat(2, 1), held)[1:] - expected).norm() < ERROR * expected.norm()


def test_a_bounded_cache_in_eight_bits_copies_its_numbers_exactly() -> None:
    ours, cache = replaced(original("v3", **SIZES)), latent_cache(2, max_tokens=64, page_tokens=8, kept="Q8_0")
    logits(ours, PROMPT[:, :21], cache)
    held: Any = copy.deepcopy(cache).layers[1]
    assert torch.equal(held.latents(0, 21), cache.layers[1].latents(0, 21))  # type: ignore[attr-defined]


@pytest.mark.skipif(not cpu.available()[0], reason="needs the CPU kernels")
def test_the_fused_layer_writes_and_reads_the_same_cache(isa: str, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("deepseek_v3", head_dim=16, first_k_dense_replace=3, **SIZES)  # no experts, whose choice may flip
    ids = torch.randint(0, 96, (1, 30), generator=torch.Generator().manual_seed(5))
    ours = fused(model, LAYERS.format(layer="auto"))
    caches = [DynamicCache(config=model.config), DynamicCache(config=model.config)]
    with torch.no_grad():
        expected = model(ids).logits
        found = torch.cat([ours(piece, cache=caches[0]).logits for piece in ids.split([20, 1, 1, 7, 1], dim=1)], dim=1)
        alone = replaced(model, kv_dtype="q8_0")
        alone(ids, cache=caches[1])
    assert_no_fallback(caplog)
    assert 0 < (found - expected).norm() < ERROR * expected.norm()
    ours_held, theirs = (cache.layers[0].latents(0, 30) for cache in caches)  # type: ignore[attr-defined]
    steps = theirs.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    off = (ours_held - theirs).unflatten(-1, (-1, 32)).abs() / steps
    assert off.max() < 1.05  # a number between two steps may go either way
    assert (off > 0.5).float().mean() < 0.01


def test_a_layer_and_its_attention_that_disagree_are_refused() -> None:
    model = random_model("deepseek_v3", head_dim=16, **SIZES)
    with pytest.raises(KtoptError, match=r"KDecoderLayer keeps latents in torch\.float32 .* its attention's rule in Q8_0"):
        fused(model, LAYERS.format(layer="float32"))


@pytest.mark.parametrize(("kv_dtype", "token_bytes"), [("auto", 1152), ("float32", 2304), ("float16", 1152), ("q8_0", 612)])
def test_a_plan_counts_what_the_cache_takes(kv_dtype: str, token_bytes: int) -> None:
    plan = ktopt.compile(SourceFile("r.yaml", V3_RULES.format(device="cpu", kv_dtype=kv_dtype)), "deepseek-v3", device="cpu")
    assert sum(each.cache_bytes for each in working_memory(plan, 6400)) == 6400 * token_bytes * 61


def test_off_the_cpu_eight_bits_are_refused_with_the_reason() -> None:
    rules = SourceFile("r.yaml", V3_RULES.format(device="cuda", kv_dtype="q8_0"))
    (error,) = ktopt.compile(rules, "deepseek-v3").errors
    assert "latents in q8_0 are read by the CPU's kernels alone, and it is on cuda:0: take bfloat16 or float16" in error
    assert not ktopt.compile(rules, "deepseek-v3", remap={"cuda": "cpu"}, device="cpu").errors


def test_a_model_whose_tokens_are_no_whole_blocks_is_refused_before_any_work() -> None:
    rules = SourceFile("r.yaml", V3_RULES.format(device="cpu", kv_dtype="q8_0"))
    model = original("v3", kv_lora_rank=20)
    (error,) = ktopt.compile(rules, model, device="cpu").errors
    assert "q8_0 keeps blocks of 32 numbers, and a token has 20 + 16" in error
    with pytest.raises(KtoptError, match="a token has 20"):
        ktopt.apply(rules, model, device="cpu")
