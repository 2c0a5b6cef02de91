"""KDynamicAttention against transformers' own attention, on small random models in float32."""

import copy
import inspect
import logging
import pickle

import pytest
import torch
from blocked_models import ANCHORS, SMALL, blocked, logits_of, pieces_of, rules
from layer_fixtures import FAMILIES, SHAPE, assert_no_fallback, difference, fused, random_model
from transformers import DynamicCache, StaticCache
from transformers.models.auto import CONFIG_MAPPING

import ktopt
from ktopt.config import CacheSettings, LongContextSettings
from ktopt.diagnostics import CompileError, KtoptError
from ktopt.operators.dynamic import ATTENTION
from ktopt.operators.modules.block_layer import BlockLayer, block_cache
from ktopt.source import SourceFile

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.randint(0, 96, (1, 110), generator=torch.Generator().manual_seed(4))
MORE = {"num_key_value_heads": 4}
"""As many key and value heads as query heads."""


@pytest.fixture(params=[*FAMILIES, "glm", "glm4_moe"])
def model(request):
    return random_model(request.param) if request.param in FAMILIES else another(request.param)


def another(family):
    """A model of another family: of GLM's, heads are rotated in part."""
    config = CONFIG_MAPPING[family](
        **SHAPE | {"attn_implementation": "eager"}, pad_token_id=0, eos_token_id=1, partial_rotary_factor=0.5, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=48, first_k_dense_replace=1,
    )  # fmt: skip
    torch.manual_seed(1)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def test_a_prompt_in_chunks_and_tokens_after_it_give_transformers_logits(model):
    ours, pieces = blocked(model), pieces_of(IDS, 57, 40)
    cache = DynamicCache(config=model.config)
    assert difference(logits_of(ours, pieces, cache), logits_of(model, pieces)) < 1e-5
    kinds = {type(layer).__name__ for layer in cache.layers}
    assert kinds <= {"BlockLayer", "LatentBlocks", "GrowingSlidingLayer"}
    assert cache.get_seq_length() == 110


@pytest.mark.parametrize("changes", [{}, MORE], ids=["grouped", "each its own"])
@pytest.mark.parametrize(
    "steps", [{}, {"token_step": 5}, {"layer_step": 2}, {"layer_step": 2, "dense_layer_num": 1, "token_step": 3}]
)
@pytest.mark.parametrize("anchor_type", ANCHORS)
def test_a_budget_of_all_blocks_is_full_attention(anchor_type, steps, changes):
    model = random_model("llama", **changes)
    ours, pieces = blocked(model, anchor_type=anchor_type, **steps), pieces_of(IDS, 96)
    assert difference(logits_of(ours, pieces), logits_of(model, pieces)) < 1e-5


@pytest.mark.parametrize("length", [64, 65, 71, 72, 80, 81, 87, 88, 95, 96, 97])
def test_prompts_that_end_at_or_beside_a_blocks_end_are_full_attention(length):
    model = random_model("llama")
    ours, pieces = blocked(model, preselect_block=True, preselect_block_count=32), pieces_of(IDS, length)
    assert difference(logits_of(ours, pieces), logits_of(model, pieces)) < 1e-5


def test_a_small_budget_is_not_full_attention():
    model = random_model("llama")
    ours, pieces = blocked(model, second_select_num=1), pieces_of(IDS, 100)
    made, expected = logits_of(ours, pieces), logits_of(model, pieces)
    assert difference(made[:, :100], expected[:, :100]) < 1e-5 < 1e-3 < difference(made[:, 100:], expected[:, 100:])


def test_a_padded_batch_gives_transformers_logits(model):
    ids = torch.cat([IDS, IDS.flip(1), IDS.roll(5, 1)])
    mask = torch.ones_like(ids)
    mask[1, :9], mask[2, :81] = 0, 0
    ours, cache, theirs = blocked(model), DynamicCache(config=model.config), DynamicCache(config=model.config)
    for end in (90, 105, *range(106, 111)):
        start = cache.get_seq_length()
        given = {"attention_mask": mask[:, :end], "position_ids": (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:]}
        made = ours(ids[:, start:end], cache=cache, **given).logits
        expected = model(ids[:, start:end], cache=theirs, **given).logits
        seen = mask[:, start:end].bool()
        assert difference(made[seen], expected[seen]) < 1e-5


def test_without_a_cache_a_text_gives_the_same_logits_with_padding_on_either_side(model):
    ours = blocked(model)
    assert difference(ours(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits) < 1e-5
    mask = torch.ones(2, 110, dtype=torch.long)
    mask[0, :30], mask[1, 70:] = 0, 0
    given = {"attention_mask": mask, "use_cache": False}
    ids = IDS.expand(2, -1)
    assert difference(ours(ids, **given).logits[mask.bool()], model(ids, **given).logits[mask.bool()]) < 1e-5


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "num_return_sequences": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 17}],
    ids=["greedy", "sampling", "lookup", "chunks"],
)
def test_generate_makes_the_same_tokens(model, options):
    made = []
    for each in (blocked(model), model):
        torch.manual_seed(5)
        made.append(
            each.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=20, min_new_tokens=20, pad_token_id=0, **options)
        )
    assert torch.equal(*made)


def test_beams_are_refused_in_words():
    with pytest.raises(KtoptError, match="beam search"):
        blocked(random_model("llama")).generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, num_beams=2)


def test_tokens_taken_back_and_others_in_their_place_give_transformers_logits(model):
    if any("sliding" in kind for kind in getattr(model.config, "layer_types", None) or ()) or model.config.model_type == "mistral":
        pytest.skip("transformers takes nothing back from a window")
    ours = blocked(model)
    cache, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    ours(IDS, cache=cache)
    model(IDS, cache=theirs)
    for kept in (100, 40):
        cache.crop(kept - cache.get_seq_length())
        theirs.crop(kept - theirs.get_seq_length())
        pieces = pieces_of(IDS.flip(1)[:, kept:], 60 if kept == 40 else 3)
        assert difference(logits_of(ours, pieces, cache), logits_of(model, pieces, theirs)) < 1e-5


def test_layers_without_the_operator_attend_by_tiles_under_the_same_masks():
    model = random_model("llama")
    some = rules().replace("@model.layers.*.self_attn", "@model.layers.1.self_attn")
    ours, cache = fused(model, some), DynamicCache(config=model.config)
    pieces = pieces_of(IDS, 57, 40)
    assert difference(logits_of(ours, pieces, cache), logits_of(model, pieces)) < 1e-5
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicLayer", "BlockLayer", "DynamicLayer"]


def test_masks_are_never_quadratic(monkeypatch):
    model = random_model("gemma3_text")
    ours = blocked(model)
    from ktopt.operators.modules import attention_function

    given, first_tokens = [], attention_function.first_tokens
    monkeypatch.setattr(attention_function, "first_tokens", lambda mask, *rest: given.append(mask) or first_tokens(mask, *rest))
    mask = torch.ones(2, 110, dtype=torch.long)
    ours(IDS.expand(2, -1), attention_mask=mask)
    assert not given
    mask[0, :5] = 0
    ours(IDS.expand(2, -1), attention_mask=mask)
    assert given
    assert all(each.dim() == 2 for each in given)


def test_packed_texts_give_transformers_logits():
    model = random_model("llama")
    given = {"position_ids": torch.cat([torch.arange(50), torch.arange(60)]).unsqueeze(0), "use_cache": False}
    assert difference(blocked(model)(IDS, **given).logits, model(IDS, **given).logits) < 1e-5


def test_holes_in_masks_are_refused_in_words():
    ours = blocked(random_model("llama"))
    mask = torch.ones_like(IDS)
    mask[:, 40:50] = 0
    with pytest.raises(KtoptError, match="padding between tokens"):
        ours(IDS, attention_mask=mask)


def test_gradients_flow_as_through_transformers_attention():
    model = random_model("llama")
    ours = blocked(model)
    made = []
    for each in (ours, model):
        each.requires_grad_(True)
        each(IDS, labels=IDS, use_cache=False).loss.backward()
        made.append(each.model.layers[0].self_attn.k_proj.weight.grad)
        each.requires_grad_(False)
    assert difference(*made) < 1e-5 < float(made[0].abs().max())


def test_a_cache_that_was_begun_elsewhere_is_taken_over():
    model = random_model("llama")
    cache, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for each in (cache, theirs):
        model(IDS[:, :90], cache=each)
    pieces = pieces_of(IDS[:, 90:])
    assert difference(logits_of(blocked(model), pieces, cache), logits_of(model, pieces, theirs)) < 1e-5
    assert all(isinstance(layer, BlockLayer) for layer in cache.layers)


def test_a_cache_of_another_kind_is_attended_to_whole(caplog):
    model = random_model("gemma3_text")
    caches = [StaticCache(config=model.config, max_cache_len=128) for _ in range(2)]
    pieces = pieces_of(IDS[:, :30], 12, 9)
    with caplog.at_level(logging.WARNING):
        assert difference(logits_of(blocked(model), pieces, caches[0]), logits_of(model, pieces, caches[1])) < 1e-5
    assert "a cache of another kind (StaticLayer)" in caplog.text


def test_a_model_in_bfloat16_stays_one():
    model = random_model("llama").bfloat16()
    ours = fused(model, rules(kv_type="BF16").replace("dtype: float32", "dtype: bfloat16"))
    made = logits_of(ours, pieces_of(IDS, 100))
    assert made.dtype is torch.bfloat16
    assert difference(made.float(), logits_of(model.float(), pieces_of(IDS, 100))) < 5e-2


def test_a_copied_and_a_pickled_model_attend_as_the_original():
    ours = blocked(random_model("llama"))
    expected = logits_of(ours, pieces_of(IDS, 100))
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert difference(logits_of(other, pieces_of(IDS, 100)), expected) == 0


def test_the_models_settings_count_where_a_kwarg_is_null_and_defaults_after_them():
    ours = fused(random_model("llama"), rules().split("kwargs:")[0] + "kwargs: {max_seq_len: 600}}\n")
    attention = ours.model.layers[0].self_attn
    small = LongContextSettings(max_seq_len=600, local_windows_len=256, preselect_block_count=2)
    assert attention.settings == (small, CacheSettings())
    with pytest.raises(KtoptError, match="the cache holds 5"):
        attention.use_long_context(LongContextSettings(local_windows_len=4096), None)
    attention.use_long_context(
        LongContextSettings(max_seq_len=6400, block_size=64, second_select_num=3, local_windows_len=64, preselect_block=False),
        CacheSettings(gpu_only=True),
    )
    long, memory = attention.settings
    assert (long.max_seq_len, long.block_size, long.second_select_num, memory.gpu_only) == (600, 64, 3, True)


def test_statistics_are_at_hand():
    ours = blocked(random_model("llama"), second_select_num=2)
    cache = DynamicCache(config=ours.config)
    assert block_cache(cache) is None
    logits_of(ours, pieces_of(IDS, 100), cache)
    counts = block_cache(cache).statistics
    assert counts.hits_host == 10 * 3 * 2 * 2
    assert counts.put_bytes > 0 == counts.misses


def test_klamaattention_is_the_same_by_ktransformers_name():
    model = random_model("llama")
    listed = """
- match: {name: "^model\\\\.layers\\\\..*\\\\.self_attn$"}
  replace:
    class: ktransformers.operators.attention.KLlamaAttention
    kwargs: {generate_device: cpu, prefill_device: cpu, block_size: 8, local_windows_len: 8, kv_type: FP32, preselect_block: false}
"""
    ours = ktopt.apply(SourceFile("rules.yaml", listed), copy.deepcopy(model), device="cpu", dtype="float32")
    cache = DynamicCache(config=model.config)
    assert difference(logits_of(ours, pieces_of(IDS, 100), cache), logits_of(model, pieces_of(IDS, 100))) < 1e-5
    assert isinstance(cache.layers[0], BlockLayer)


@pytest.mark.parametrize(
    ("family", "kwargs", "said"),
    [
        ("gemma2", {}, "Gemma2Attention.*attention interface"),
        ("llama", {"anchor_num": 3}, "QUEST.*anchor_num: 2.*not 3"),
        ("llama", {"max_seq_len": 64, "local_windows_len": 64}, "cache holds 9"),
        ("llama", {"anchor_type": "QUESTS"}, "QUEST"),
    ],
)
def test_a_plan_refuses_what_cant_be(family, kwargs, said):
    with pytest.raises(CompileError, match=said):
        blocked(random_model(family) if family in FAMILIES else another(family), **kwargs)


def test_the_listed_classes_ask_attention_for_no_more_than_it_computes():
    import transformers

    found = set()
    for name in dir(transformers.models):
        package = getattr(transformers.models, name)
        modeling = next((part for part in dir(package) if part.startswith("modeling_")), None)
        for cls in vars(getattr(package, modeling)).values() if modeling else ():
            if inspect.isclass(cls) and cls.__name__ in ATTENTION and cls.__module__.startswith("transformers"):
                found.add(cls.__name__)
                code = inspect.getsource(cls.forward)
                call = code[code.index("attention_interface(") :]
                assert "update(key_states, value_states, self.layer_idx" in code
                assert not any(word in call for word in ("softcap", "s_aux", "sinks", "position_bias", "indices")), cls
                text = inspect.getsource(inspect.getmodule(cls))
                slides = "create_sliding_window_causal_mask" in text
                assert "sliding_window=" in call or "self.sliding_window =" in inspect.getsource(cls) or not slides, cls
    assert found == ATTENTION


def test_settings_of_the_tests_are_in_blocks():
    assert SMALL["max_seq_len"] % SMALL["block_size"] == 0


@pytest.mark.parametrize("settings", [{}, {"second_select_num": 2, "token_step": 3, "layer_step": 2}, {"chunk_size": 16}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_layer_computes_the_same(family, settings, caplog):
    model = random_model(family)
    separate, one = blocked(model, **settings), blocked(model, fuse=True, **settings)
    pieces = pieces_of(IDS, 57, 40)
    assert difference(logits_of(one, pieces), logits_of(separate, pieces)) < 2e-5
    assert_no_fallback(caplog)


def test_a_fused_layer_takes_a_padded_batch(caplog):
    model = random_model("qwen3")
    ids, mask = torch.cat([IDS, IDS.flip(1)]), torch.ones(2, 110, dtype=torch.long)
    mask[1, :75] = 0
    ours, cache, theirs = blocked(model, fuse=True), DynamicCache(config=model.config), DynamicCache(config=model.config)
    for end in (100, *range(101, 111)):
        start = cache.get_seq_length()
        given = {"attention_mask": mask[:, :end], "position_ids": (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:]}
        made, expected = (each(ids[:, start:end], cache=c, **given).logits for each, c in ((ours, cache), (model, theirs)))
        seen = mask[:, start:end].bool()
        assert difference(made[seen], expected[seen]) < 2e-5
    assert_no_fallback(caplog)


def test_a_fused_layer_generates_the_same_tokens():
    model = random_model("llama")
    given = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 30, "pad_token_id": 0}
    assert torch.equal(blocked(model, fuse=True).generate(IDS, **given), model.generate(IDS, **given))
