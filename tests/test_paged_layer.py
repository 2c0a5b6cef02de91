"""KDecoderLayer and KDeepseekV2Attention over pages of many sequences, against transformers and against other caches of theirs."""

import pytest
import torch
from gguf import GGMLQuantizationType, quantize
from layer_fixtures import FAMILIES, RULES, assert_no_fallback, difference, fused, random_model
from test_paged_cache import PAGE, expected, prompt, run_all
from transformers import DynamicCache

from ktopt.cache.paged import PagedCache, cannot_page, forward_paged
from ktopt.diagnostics import KtoptError
from ktopt.kernels import cpu

pytestmark = [
    pytest.mark.skipif(not cpu.available()[0], reason="the CPU kernels were not built"),
    pytest.mark.usefixtures("one_thread"),
]
LATENT = [name for name in FAMILIES if name.startswith("deepseek")]
ATTENTION = "  - {match: '@model.layers.*.self_attn', replace: KDeepseekV2Attention}\n"
KEPT = ATTENTION.replace("Attention}", "Attention, kwargs: {kv_dtype: float32}}")
BOTH = RULES + KEPT
ALONE = "\n".join(RULES.splitlines()[:5]) + "\n" + ATTENTION
REQUESTS = [(prompt(1, 5), 9, 99), (prompt(2, 41), 5, 20), (prompt(3, 1), 20, 1), (prompt(4, 23), 3, 7), (prompt(5, 50), 12, 17)]


def stored(family: str, kind: str):
    """A random model whose layers' matrices are kept in a storage type, as a GGUF file has them."""
    ours = fused(random_model(family, intermediate_size=96))
    for module in ours.model.layers.modules():
        if kind != "F32" and isinstance(module, torch.nn.Linear):
            data = quantize(module.weight.numpy(), GGMLQuantizationType[kind])
            module.__dict__["parts"] = [(0, cpu.blocks(kind, *module.weight.shape, data))]
    return ours


def whole(model, ids: list[int]) -> torch.Tensor:
    """The logits (V) of a text's last token, without a cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_that_join_and_leave_are_each_as_generate_makes_them(family, caplog):
    model = random_model(family)
    ours = fused(model)
    cache = PagedCache(ours, tokens=20 * PAGE, page_tokens=PAGE)
    assert run_all(ours, cache, REQUESTS) == [expected(model, ids, count) for ids, count, _ in REQUESTS]
    assert cache.used_pages == 0
    assert_no_fallback(caplog)


@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize("rules", [ALONE, BOTH], ids=["attention alone", "attention within layers"])
def test_latents_are_paged_by_the_attention_too(family, rules, caplog):
    model = random_model(family)
    ours = fused(model, rules)
    cache = PagedCache(ours, tokens=20 * PAGE, page_tokens=PAGE)
    assert cache.bytes_per_token == 3 * (32 + 8) * 4
    assert run_all(ours, cache, REQUESTS) == [expected(model, ids, count) for ids, count, _ in REQUESTS]
    assert_no_fallback(caplog)


@pytest.mark.parametrize("kept", ["bfloat16", "q8_0"])
@pytest.mark.parametrize("layers", [True, False], ids=["within layers", "alone"])
def test_latents_kept_in_less_come_close(kept, layers):
    model = random_model("deepseek_v3", kv_lora_rank=48, qk_rope_head_dim=16, head_dim=16)
    rules = BOTH.replace("kwargs: {kv_dtype: float32}", "kwargs: {kv_dtype: auto}", 1) if layers else ALONE
    rules = rules.replace(ATTENTION, KEPT)
    ours = fused(model, rules.replace("kv_dtype: float32", f"kv_dtype: {kept}"))
    cache = PagedCache(ours, tokens=8 * PAGE, page_tokens=PAGE)
    assert cache.bytes_per_token == 3 * (64 * 2 if kept == "bfloat16" else 68)
    ids = prompt(6, 60)
    sequence, usual = cache.sequence(ids), DynamicCache(config=ours.config)
    for at, end in ((0, 33), (33, 50), (50, 59), (59, 60)):
        logits = forward_paged(ours, cache, [(sequence, ids[at:end])])
        alone = ours(torch.tensor([ids[at:end]]), cache=usual).logits[0, -1]
        assert difference(logits[0], alone) < 2e-3
    assert 1e-6 < difference(logits[0], whole(model, ids)) < 0.1


def test_latent_attention_of_transformers_is_refused():
    model = random_model("deepseek_v3")
    assert "KDeepseekV2Attention or KDecoderLayer can" in cannot_page(model)
    with pytest.raises(KtoptError, match="DeepseekV3Attention"):
        PagedCache(model, tokens=64)


@pytest.mark.parametrize("isa", cpu.isas() if cpu.available()[0] else [])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v2"])
def test_every_instruction_set_gives_the_logits_of_torch(family, isa):
    model = random_model(family)
    ours = fused(model)
    cache = PagedCache(ours, tokens=20 * PAGE, page_tokens=PAGE)
    long, short, one = prompt(1, 70), prompt(2, 19), prompt(3, 33)
    cpu.use_isa(isa)
    try:
        first, second, third = (cache.sequence(ids) for ids in (long, short, one))
        forward_paged(ours, cache, [(third, one[:32]), (first, long[:30])])
        logits = forward_paged(ours, cache, [(first, long[30:]), (second, short), (third, one[32:])])
    finally:
        cpu.use_isa(None)
    for row, ids in enumerate((long, short, one)):
        assert difference(logits[row], whole(model, ids)) < 2e-5


@pytest.mark.parametrize("kept", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_keys_kept_in_halves_give_what_a_growing_cache_gives(family, kept):
    ours = fused(random_model(family), RULES.replace("kv_dtype: float32", f"kv_dtype: {kept}"))
    cache, grown = PagedCache(ours, tokens=8 * PAGE, page_tokens=PAGE), DynamicCache(config=ours.config)
    ids = prompt(4, 60)
    sequence = cache.sequence(ids)
    for at, end in ((0, 37), (37, 54), *((i, i + 1) for i in range(54, 60))):
        made = forward_paged(ours, cache, [(sequence, ids[at:end])])
        usual = ours(torch.tensor([ids[at:end]]), cache=grown).logits[0, -1]
        assert difference(made[0], usual) < 2e-5


def test_more_rows_than_go_through_a_layer_at_once_are_read_like_few(caplog):
    model = random_model("llama", max_position_embeddings=2048)
    ours = fused(model)
    cache = PagedCache(ours, tokens=3000, page_tokens=64)
    texts = [prompt(1, 900), prompt(2, 1), prompt(3, 700)]
    sequences = [cache.sequence(ids) for ids in texts]
    logits = forward_paged(ours, cache, list(zip(sequences, texts, strict=True)))
    for row, ids in enumerate(texts):
        assert difference(logits[row], whole(model, ids)) < 5e-5
    assert_no_fallback(caplog)


@pytest.mark.parametrize("isa", cpu.isas() if cpu.available()[0] else [])
@pytest.mark.parametrize(("family", "kind"), [("llama", "Q8_0"), ("gemma3_text", "Q4_1"), ("qwen3_moe", "F32")])
def test_who_else_is_in_a_step_changes_no_bit_of_what_layers_compute(family, kind, isa):
    """But for weights that are floats, whose sums over many rows have another order."""
    ours = stored(family, kind)
    last: list[torch.Tensor] = []
    ours.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0, -1].clone()))

    def step(others: int, piece: int = 0) -> torch.Tensor:
        cache = PagedCache(ours, tokens=60 * PAGE, page_tokens=PAGE, steady=True)
        ids = prompt(1, 45)
        sequence = cache.sequence(ids)
        forward_paged(ours, cache, [(sequence, ids[:44])])
        rest = [cache.sequence(prompt(n, 9 + n)) for n in range(2, 2 + others)]
        for n, each in enumerate(rest, start=2):
            forward_paged(ours, cache, [(each, prompt(n, 9 + n))])
        read = [(cache.sequence([5]), prompt(5, piece))] if piece else []
        forward_paged(ours, cache, [*read, *((each, [7]) for each in rest), (sequence, ids[44:])])
        return last[-1]

    cpu.use_isa(isa)
    try:
        alone = step(0)
        for others in ((1,), (2,), (9,), (1, 19)):
            assert difference(step(*others), alone) <= (1e-5 if kind == "F32" else 0)
    finally:
        cpu.use_isa(None)


def test_a_step_that_overflows_halves_is_told_and_leaves_lengths_alone():
    model = random_model("llama")
    model.model.layers[1].self_attn.v_proj.weight.data *= 1e6
    ours = fused(model, RULES.replace("kv_dtype: float32", "kv_dtype: float16"))
    cache = PagedCache(ours, tokens=4 * PAGE, page_tokens=PAGE)
    sequence = cache.sequence([1, 2, 3])
    with pytest.raises(KtoptError, match="layer 1"):
        forward_paged(ours, cache, [(sequence, [1, 2, 3])])
    assert sequence.length == 0
    cache.check()
