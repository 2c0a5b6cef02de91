"""KDeepseekV2Attention against transformers' own attention, in small random models: prompts in chunks, absorbed and expanded,
decoding, padding, caches that are cut, reordered and shared.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf_fixtures import tiny_model
from transformers import Cache, DynamicCache

from ktopt.cache.latent import LatentLayer, latent_cache
from ktopt.diagnostics import KtoptError
from ktopt.kernels import cpu
from ktopt.operator import build_config
from ktopt.operators import latent_memory
from ktopt.operators.modules import attention_mla
from ktopt.operators.modules.attention_mla import KDeepseekV2Attention
from ktopt.registry import find

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7,
    "mscale_all_dim": 0.9, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {}),
    "v2 yarn": ("deepseek_v2", {"rope_parameters": YARN}),
    "v2 without q_lora": ("deepseek_v2", {"q_lora_rank": None}),
    "v3": ("deepseek_v3", {}),
    "v3 yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "v3 halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3 other sizes": ("deepseek_v3", {"v_head_dim": 48, "qk_nope_head_dim": 24, "kv_lora_rank": 20, "q_lora_rank": None}),
}
PROMPT = torch.arange(40).view(1, 40) * 7 % 300
SMALL_TILES = {"TILE_SCORES": {"cpu": 1024}, "LEAST_TOKENS": 9, "LEAST_QUERIES": 8}


def original(name: str, **changes: Any) -> Any:
    kind, own = MODELS[name]
    return tiny_model(kind, **{"attn_implementation": "eager", **own, **changes})


def replaced(model: Any, **kwargs: Any) -> Any:
    """A copy of a model whose attention is ours."""
    config, problems = build_config(find("KDeepseekV2Attention"), kwargs)
    assert config is not None, problems
    made = copy.deepcopy(model)
    for index, layer in enumerate(made.model.layers):
        context = SimpleNamespace(step=SimpleNamespace(path=f"model.layers.{index}.self_attn"), config=config)
        layer.self_attn = KDeepseekV2Attention.build(layer.self_attn, context)  # type: ignore[arg-type]
        assert isinstance(layer.self_attn, KDeepseekV2Attention)
    return made


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, cache: Any = None, **inputs: Any) -> torch.Tensor:
    return model(input_ids=ids, cache=cache, use_cache=cache is not None, **inputs).logits


@pytest.fixture(autouse=True)
def no_fallback(caplog: pytest.LogCaptureFixture) -> Any:
    """Every test computes by our attention, unless it says otherwise."""
    attention_mla._say.cache_clear()
    with caplog.at_level(logging.WARNING, attention_mla.log.name):
        yield
    assert not [record for record in caplog.records if record.name == attention_mla.log.name and "expected" not in caplog.text]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a prompt of forty tokens takes many."""
    for name, value in SMALL_TILES.items():
        monkeypatch.setattr(latent_memory, name, value)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("absorb", [True, False, "auto"])
@pytest.mark.parametrize("chunk", [1, 7, 128, None])
@pytest.mark.usefixtures("small_tiles")
def test_a_prompt_in_chunks_gives_the_logits_of_transformers(name: str, absorb: Any, chunk: int | None) -> None:
    model = original(name)
    close(logits(replaced(model, absorb_for_prefill=absorb, chunk_size=chunk), PROMPT), logits(model, PROMPT))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decode_cache", ["latent", "expanded"])
def test_a_prompt_fed_piece_by_piece_and_decoding_give_the_same_logits(name: str, decode_cache: str) -> None:
    model = original(name)
    ours = replaced(model, absorb_for_prefill="auto", decode_cache=decode_cache, page_size=8)
    expected, cache = logits(model, PROMPT), DynamicCache(config=model.config)
    pieces = [logits(ours, piece, cache) for piece in PROMPT.split([17, 5, 1, 1, 14, 1, 1], dim=1)]
    close(torch.cat(pieces, dim=1), expected)
    assert all(isinstance(layer, LatentLayer) for layer in cache.layers)


@pytest.mark.skipif(not cpu.available()[0], reason="needs the CPU kernels")
@pytest.mark.parametrize("name", ["v2", "v3"])
def test_decoding_is_the_cpu_kernel_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, cache = replaced(original(name)), DynamicCache()
    logits(ours, PROMPT[:, :30], cache)
    monkeypatch.setattr(KDeepseekV2Attention, "_by_tiles", None)
    close(logits(ours, PROMPT[:, 30:], cache), logits(original(name), PROMPT)[:, 30:])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("absorb", [True, False, "auto"])
@pytest.mark.parametrize("chunk", [None, 20, 5])
@pytest.mark.parametrize("decode_cache", ["latent", "expanded"])
@pytest.mark.usefixtures("small_tiles")
def test_padded_sequences_have_the_logits_that_they_have_alone(
    side: str, absorb: Any, implementation: str, chunk: int | None, decode_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_mla, "FEW_QUERIES", 3)  # so that chunks are computed as prompts are
    model = original("v3", attn_implementation=implementation)
    ours = replaced(model, absorb_for_prefill=absorb, page_size=4, chunk_size=chunk, decode_cache=decode_cache)
    lengths, longest, steps = (5, 24, 17), 24, 3
    prompts = [PROMPT[:, 3 : 3 + length + steps] for length in lengths]
    ids = torch.zeros(3, longest, dtype=torch.long)
    mask = torch.zeros(3, longest + steps, dtype=torch.long)
    mask[:, longest:] = 1
    for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        place = slice(longest - length, longest) if side == "left" else slice(0, length)
        ids[row, place] = prompt[0, :length]
        mask[row, place] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    found = logits(ours, ids, cache, attention_mask=mask[:, :longest], position_ids=positions[:, :longest])
    for step in range(steps):
        at, row_ids = longest + step, torch.cat([p[:, n + step : n + step + 1] for p, n in zip(prompts, lengths, strict=True)])
        more = logits(ours, row_ids, cache, attention_mask=mask[:, : at + 1], position_ids=positions[:, at : at + 1])
        found = torch.cat((found, more), dim=1)
    for row, prompt in enumerate(prompts):
        close(found[row][mask[row].bool()], logits(model, prompt)[0])


@pytest.mark.parametrize("absorb", [True, False, "auto"])
@pytest.mark.parametrize("kernels", [True, False])
def test_left_padded_prompts_longer_than_a_chunk_go_on_over_padded_caches(
    absorb: Any, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns, each of several chunks, by the CPU kernels and by torch."""
    if not kernels:
        monkeypatch.setattr(attention_mla, "attend_prompt", lambda *_: None)
        monkeypatch.setattr(KDeepseekV2Attention, "_by_kernel", lambda *_: None)
    model = original("v3")
    ours, cache = replaced(model, absorb_for_prefill=absorb, page_size=8, chunk_size=19), DynamicCache(config=model.config)
    ids, mask = PROMPT.repeat(3, 2), torch.ones(3, 80, dtype=torch.long)
    mask[1, :23], mask[2, :40] = 0, 0  # more than a chunk, and two
    ids[1], ids[2] = ids[1].roll(3), ids[2].flip(0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = [
        logits(ours, ids[:, part], cache, attention_mask=mask[:, : part.stop], position_ids=positions[:, part])
        for part in (slice(0, 45), slice(45, 79), slice(79, 80))
    ]
    for row, start in enumerate((0, 23, 40)):
        close(torch.cat(found, dim=1)[row, start:], logits(model, ids[row : row + 1, start:])[0])


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_a_cache_that_was_cut_goes_on_as_if_nothing_had_been_there(page_size: int) -> None:
    model = original("v3")
    ours, cache = replaced(model, page_size=page_size, decode_cache="expanded"), DynamicCache(config=model.config)
    logits(ours, PROMPT[:, :25], cache)
    logits(ours, PROMPT[:, :3], cache)  # guesses that were wrong
    cache.crop(-11)
    assert cache.get_seq_length() == 17
    close(logits(ours, PROMPT[:, 17:20], cache), logits(model, PROMPT[:, :20])[:, 17:])


@pytest.mark.parametrize("decode_cache", ["latent", "expanded"])
def test_generation_by_beams_and_with_an_assistant_gives_transformers_tokens(decode_cache: str) -> None:
    model = original("v3")
    ours = replaced(model, page_size=4, decode_cache=decode_cache)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(PROMPT)}
    for more in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(ours.generate(PROMPT, **options, **more), model.generate(PROMPT, **options, **more)), more
    assistant = original("v3", seed=1)
    assert torch.equal(ours.generate(PROMPT, assistant_model=assistant, **options), model.generate(PROMPT, **options))


@pytest.mark.parametrize("absorb", [True, False, "auto"])
@pytest.mark.parametrize("name", ["v2", "v3"])
def test_in_bfloat16_logits_are_within_two_percent(name: str, absorb: Any) -> None:
    model = original(name)
    ours, cache = replaced(model.bfloat16(), absorb_for_prefill=absorb), DynamicCache()
    expected = logits(model.float(), PROMPT)
    found = torch.cat([logits(ours, piece, cache) for piece in PROMPT.split([30, 5, 1, 1, 3], dim=1)], dim=1).float()
    assert (found - expected).norm() < 2e-2 * expected.norm()
    assert cache.layers[0].dtype is torch.bfloat16  # type: ignore[attr-defined]


def test_copies_of_a_cache_share_its_pages_until_they_differ() -> None:
    model = original("v3")
    ours, prefix = replaced(model, page_size=8), DynamicCache()
    logits(ours, PROMPT[:, :20], prefix)
    copies = [copy.deepcopy(prefix) for _ in range(3)]
    pool = prefix.layers[0].pool  # type: ignore[attr-defined]
    held = pool.pages_GTW.shape[0] - pool.free
    assert held == 3
    for start, branch in enumerate(copies):
        ids = torch.cat((PROMPT[:, :20], PROMPT[:, start : start + 4]), dim=1)
        close(logits(ours, ids[:, 20:], branch), logits(model, ids)[:, 20:])
    assert pool.pages_GTW.shape[0] - pool.free == 3 + 3  # a copy of the last page for each
    del copies, branch
    assert pool.pages_GTW.shape[0] - pool.free == 3
    close(logits(ours, PROMPT[:, 20:], prefix), logits(model, PROMPT)[:, 20:])


def test_a_bounded_cache_refuses_what_is_beyond_it_before_any_work() -> None:
    ours = replaced(original("v3"), page_size=8)
    cache = latent_cache(2, max_tokens=32, page_tokens=8)
    logits(ours, PROMPT[:, :30], cache)
    with pytest.raises(KtoptError, match="holds 32 tokens: 30 are there, and 3 more are too many"):
        logits(ours, PROMPT[:, :3], cache)
    assert cache.get_seq_length() == 30
    close(logits(ours, PROMPT[:, 30:32], cache), logits(original("v3"), PROMPT[:, :32])[:, 30:])


def test_a_cache_of_other_sequences_is_refused_with_their_numbers() -> None:
    ours, cache = replaced(original("v3")), DynamicCache()
    logits(ours, PROMPT, cache)
    with pytest.raises(KtoptError, match="the cache holds 1 sequences, and 2 are given"):
        logits(ours, PROMPT.repeat(2, 1), cache)


def test_a_page_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(KtoptError, match="page_size 7 doesn't divide the 32 tokens"):
        latent_cache(2, max_tokens=32, page_tokens=7)


def test_a_cache_used_by_transformers_first_is_taken_over() -> None:
    model = original("v3")
    ours, cache = replaced(model), DynamicCache(config=model.config)
    logits(model, PROMPT[:, :20], cache)
    close(logits(ours, PROMPT[:, 20:], cache), logits(model, PROMPT)[:, 20:])


def test_what_is_not_here_is_transformers_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = original("v3")
    ours = replaced(model)
    caplog.set_level(logging.WARNING)
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=64)
    close(logits(ours, PROMPT, cache), logits(model, PROMPT))
    assert "DeepseekV3Attention runs as transformers has it: a cache of another kind (StaticLayer)" in caplog.text
    ours.train()
    ours(input_ids=PROMPT, labels=PROMPT).loss.backward()
    assert ours.model.layers[0].self_attn.kv_b_proj.weight.grad is not None
    assert "a gradient is asked for" in caplog.text
    caplog.handler.records.append(logging.LogRecord("expected", 0, "", 0, "expected", (), None))
    logging.getLogger("expected").warning("expected")


def test_copies_and_pickles_of_the_module_compute_the_same(tmp_path: Any) -> None:
    ours = replaced(original("v3"))
    expected = logits(ours, PROMPT)
    assert torch.equal(logits(copy.deepcopy(ours), PROMPT), expected)
    torch.save(ours, tmp_path / "model.pt")
    assert torch.equal(logits(torch.load(tmp_path / "model.pt", weights_only=False), PROMPT), expected)


def test_a_module_that_is_no_latent_attention_is_refused() -> None:
    llama = tiny_model("llama").model.layers[0].self_attn
    context = SimpleNamespace(step=SimpleNamespace(path="model.layers.0.self_attn"), config=None)
    with pytest.raises(KtoptError, match="not multi-head latent attention: it has no kv_b_proj"):
        KDeepseekV2Attention.build(llama, context)  # type: ignore[arg-type]


def test_the_choice_of_auto_is_that_of_fewer_operations() -> None:
    sizes = latent_memory.LatentSizes(heads=128, nope=128, rope=64, value=128, latent=512, hidden=7168)
    choices = [latent_memory.prefers_absorbed(queries, 100_000, sizes) for queries in (16, 150, 165, 175, 200, 8192)]
    assert choices == [True, True, True, False, False, False]


def test_a_cache_is_transformers_cache() -> None:
    assert isinstance(latent_cache(1, 64), Cache)
