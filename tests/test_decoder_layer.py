"""KDecoderLayer against transformers' own layers, on small random models in float32."""

import copy
import logging
import pickle

import pytest
import torch
from layer_fixtures import FAMILIES, RULES, SHAPE, TEXT, assert_no_fallback, difference, fused, random_model
from transformers import DynamicCache, StaticCache
from transformers.models.auto import CONFIG_MAPPING

import ktopt
from ktopt.diagnostics import KtoptError
from ktopt.kernels import cpu
from ktopt.operators.modules.masks import first_tokens
from ktopt.source import SourceFile

pytestmark = [
    pytest.mark.skipif(not cpu.available()[0], reason="the CPU kernels were not built"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(params=FAMILIES)
def pair(request):
    """A random model and its fused counterpart."""
    model = random_model(request.param)
    return model, fused(model)


def test_a_prompt_and_each_token_after_it_give_transformers_logits(pair, caplog):
    model, ours = pair
    cache, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for piece in (TEXT[:, :9], TEXT[:, 9:10], TEXT[:, 10:11], TEXT[:, 11:17], *TEXT[:, 17:].split(1, dim=1)):
        made, expected = ours(piece, cache=cache).logits, model(piece, cache=theirs).logits
        assert difference(made, expected) < 2e-5
    assert cache.get_seq_length() == 23
    assert_no_fallback(caplog)


def test_a_padded_batch_gives_transformers_logits(pair, caplog):
    model, ours = pair
    ids = torch.cat([TEXT, TEXT.flip(1), TEXT.roll(5, 1)])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    mask[2, :15] = 0
    cache, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for end in (20, 21, 22, 23):
        start = cache.get_seq_length()
        given = {"attention_mask": mask[:, :end], "position_ids": (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:]}
        made = ours(ids[:, start:end], cache=cache, **given).logits
        expected = model(ids[:, start:end], cache=theirs, **given).logits
        seen = mask[:, start:end].bool()
        assert difference(made[seen], expected[seen]) < 2e-5
    assert_no_fallback(caplog)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}, {"prompt_lookup_num_tokens": 3}],
    ids=["greedy", "beams", "sampling", "lookup"],
)
def test_generate_makes_the_same_tokens(pair, options, caplog):
    model, ours = pair
    made = []
    for each in (ours, model):
        torch.manual_seed(5)
        made.append(each.generate(TEXT, attention_mask=torch.ones_like(TEXT), max_new_tokens=14, pad_token_id=0, **options))
    assert torch.equal(*made)
    assert_no_fallback(caplog)


def test_without_a_cache_a_text_gives_the_same_logits(pair):
    model, ours = pair
    assert difference(ours(TEXT, use_cache=False).logits, model(TEXT, use_cache=False).logits) < 2e-5


def test_eager_masks_are_understood_too(caplog):
    model = random_model("mistral", attn_implementation="eager")
    assert difference(fused(model)(TEXT).logits, model(TEXT).logits) < 2e-5
    assert_no_fallback(caplog)


def test_a_long_prompt_goes_through_in_pieces_that_see_what_was_before():
    model = random_model("llama", max_position_embeddings=2048)
    ids = torch.randint(0, 96, (2, 1100))
    assert difference(fused(model)(ids).logits, model(ids).logits) < 5e-5


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_a_narrower_cache_costs_its_rounding(kv_dtype):
    model = random_model("llama")
    ours = fused(model, RULES.replace("kv_dtype: float32", f"kv_dtype: {kv_dtype}"))
    cache = DynamicCache(config=model.config)
    made = ours(TEXT, cache=cache).logits
    assert cache.layers[0].keys.dtype is getattr(torch, kv_dtype)
    assert 0 < difference(made, model(TEXT).logits) < {"float16": 2e-3, "bfloat16": 2e-2}[kv_dtype]


def test_a_bfloat16_model_stays_one():
    model = random_model("llama").bfloat16()
    made = fused(model, RULES.replace("dtype: float32\n", "dtype: bfloat16\n", 1))(TEXT).logits
    assert made.dtype is torch.bfloat16
    assert difference(made.float(), model.float()(TEXT).logits) < 3e-2


def test_keys_beyond_float16_are_an_error_that_says_what_to_do():
    model = random_model("llama")
    model.model.layers[1].self_attn.k_proj.weight.data *= 1e6
    ours = fused(model, RULES.replace("float32}", "float16}"))
    with pytest.raises(KtoptError, match=r"layer 1.*65504.*kv_dtype"):
        ours(TEXT)
    wide = fused(model)
    assert difference(wide(TEXT).logits, model(TEXT).logits) < 1e-3


def test_instruction_sets_and_threads_agree():
    model = random_model("gemma3_text")
    expected = model(TEXT).logits
    ours, threads = fused(model), torch.get_num_threads()
    try:
        for name in cpu.isas():
            cpu.use_isa(name)
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert difference(ours(TEXT).logits, expected) < 2e-5, (name, count)
    finally:
        cpu.use_isa(None)
        torch.set_num_threads(threads)


def test_hidden_states_come_from_the_fused_layers(caplog):
    model = random_model("gemma3_text")
    ours = fused(model)
    made, expected = (each(TEXT, output_hidden_states=True).hidden_states for each in (ours, model))
    assert len(made) == 4
    assert all(difference(a, b) < 2e-5 for a, b in zip(made, expected, strict=True))
    assert_no_fallback(caplog)


def test_weights_that_change_are_seen():
    model = random_model("gemma3_text")
    ours = fused(model)
    ours(TEXT)
    for each in (model, ours):
        each.model.layers[0].input_layernorm.weight.data.mul_(0.5)
        each.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(model.model.layers[0].self_attn.q_proj.weight * 2)
    with torch.no_grad():
        ours.model.layers[0].input_layernorm.weight.add_(0)
        assert difference(ours(TEXT).logits, model(TEXT).logits) < 2e-5


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_model_computes_with_its_new_weights(family, dtype):
    if dtype is torch.float64 and "num_experts_per_tok" in FAMILIES[family]:
        pytest.skip("torch has no grouped product of float64")
    model = random_model(family)
    ours = fused(model)
    ours(TEXT)
    made, expected = ours.to(dtype)(TEXT).logits, model.to(dtype).float()(TEXT).logits
    assert made.dtype is dtype
    assert difference(made.float(), expected) < {torch.bfloat16: 3e-2, torch.float16: 3e-3, torch.float64: 5e-5}[dtype]


def test_weights_given_other_memory_are_seen():
    model = random_model("llama")
    ours = fused(model)
    ours(TEXT)
    for each in (model, ours):
        each.model.layers[1].mlp.up_proj.weight.data = each.model.layers[1].mlp.up_proj.weight.data * 3
        each.model.norm.weight.data = each.model.norm.weight.data + 1
        each.model.layers[0].input_layernorm.weight.data = each.model.layers[0].input_layernorm.weight.data + 1
    assert difference(ours(TEXT).logits, model(TEXT).logits) < 5e-5


def test_numbers_that_change_are_seen():
    model = random_model("qwen3_moe")
    ours = fused(model)
    ours(TEXT)
    for each in (model, ours):
        each.model.layers[0].self_attn.scaling *= 0.5
        each.model.layers[0].mlp.gate.top_k = 1
        each.model.layers[2].input_layernorm.variance_epsilon = 0.5
        each.model.layers[2].mlp.experts.act_fn = torch.nn.ReLU()
    assert difference(ours(TEXT).logits, model(TEXT).logits) < 2e-5


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"sliding_window": 5}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("deepseek_v2", {"n_shared_experts": 0}),
    ],
)
def test_configs_that_say_what_a_class_does_not_do(family, changes):
    model = random_model(family, **changes)
    assert difference(fused(model)(TEXT).logits, model(TEXT).logits) < 2e-5


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_one_mask_serves_all_sequences(family):
    model = random_model(family)
    ids = torch.cat([TEXT, TEXT.flip(1)])[:, :6]
    mask = torch.tril(torch.ones(1, 1, 6, 6, dtype=torch.bool))
    mask[..., :2] = False
    made, expected = (each(ids, attention_mask=mask).logits[:, 2:] for each in (fused(model), model))
    assert difference(made, expected) < 2e-5


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_cache_made_in_inference_mode_goes_on_outside_of_it(family):
    model = random_model(family)
    ours, cache = fused(model), DynamicCache(config=model.config)
    with torch.inference_mode():
        ours(TEXT[:, :9], cache=cache)
    with torch.no_grad():
        made = model(TEXT[:, 9:], cache=cache).logits
        assert difference(made, model(TEXT).logits[:, 9:]) < 2e-5


def test_numbers_that_are_none_pass_through_a_float16_cache():
    ours = fused(random_model("llama"), RULES.replace("float32}", "float16}"))
    x = torch.randn(2, 3, 64)
    x[0, 1, 5] = torch.nan
    made = ours(inputs_embeds=x).logits
    assert made[0, 1:].isnan().all()
    assert made[1].isfinite().all()


def test_copies_and_pickles_run():
    model = random_model("qwen3")
    ours = fused(model)
    ours(TEXT)
    expected = ours(TEXT).logits
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        del_name = type(made.model.layers[0]).__name__
        assert del_name == "KQwen3DecoderLayer"
        assert torch.equal(made(TEXT).logits, expected)


def test_another_modules_forward_is_refused_when_the_plan_is_applied():
    model = random_model("llama")
    model.model.layers[2].mlp.act_fn = torch.nn.Tanh()
    with pytest.raises(KtoptError, match=r"layers\.2: .*no Tanh"):
        fused(model)
    model = random_model("llama")
    model.model.layers[1].self_attn.o_proj.forward = lambda x: x
    with pytest.raises(KtoptError, match=r"layers\.1"):
        fused(model)


def test_a_plan_refuses_a_child_elsewhere():
    linear = "replace: KTransformersLinear, kwargs: {generate_op: KLinearTorch, generate_device: cuda}"
    rules = RULES + f'  - {{match: "@model.layers.1.mlp.down_proj", {linear}}}\n'
    plan = ktopt.compile(SourceFile("rules.yaml", rules), "llama-3.1-8b")
    assert any("KT407" in error and "model.layers.1.mlp.down_proj is on cuda:0" in error for error in plan.errors)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "no activation gelu"),
        ({"head_dim": 12}, "multiple of 16 numbers, not 12"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rotates a part"),
    ],
)
def test_a_plan_refuses_a_config_that_the_kernels_do_not_compute(changes, reason, tmp_path):
    config = CONFIG_MAPPING["llama"](**{**SHAPE, **changes}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    plan = ktopt.compile(SourceFile("rules.yaml", RULES), tmp_path)
    assert any("KT407" in error and reason in error for error in plan.errors)


@pytest.mark.parametrize(
    ("window", "past", "reason"),
    [(0, 3, "more or fewer"), (4, 0, ""), (0, 0, "")],
)
def test_masks_that_cover_other_tokens_are_told(window, past, reason):
    queries = 6
    own = torch.arange(queries)
    mask = own.view(-1, 1) >= own
    if window:
        mask &= own > own.view(-1, 1) - window
    told = first_tokens(mask.view(1, 1, queries, queries), 1, queries, past, window)
    assert reason in told if reason else told == 0


def test_rows_that_are_padding_alone_are_told():
    """As the first chunk of a padded prompt may have them."""
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    mask[1] = False
    assert first_tokens(mask, 2, 4, 0, 0).tolist() == [0, 4]
    mask[0, :, 2] = False
    assert first_tokens(mask, 2, 4, 0, 0) == "an attention mask that is more than causality and padding"


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_was_changed_is_looked_at_again(inference):
    """Tensors made in inference mode don't count their changes."""
    with torch.inference_mode(inference):
        mask = torch.ones(4, 4, dtype=torch.bool).tril().view(1, 1, 4, 4)
        assert first_tokens(mask, 1, 4, 0, 0) == 0
        mask[..., :2] = False
        assert first_tokens(mask, 1, 4, 0, 0).tolist() == [2]
        assert first_tokens(mask, 1, 4, 0, 0).tolist() == [2]


def test_nothing_is_logged_twice(caplog):
    with caplog.at_level(logging.WARNING):
        ours = fused(random_model("llama"))
        cache = StaticCache(config=ours.config, max_cache_len=40)
        ours(TEXT[:, :4], cache=cache)
        ours(TEXT[:, 4:8], cache=cache)
    assert len([r for r in caplog.records if "not as one kernel" in r.message]) <= 1


OVER_ATTENTION = """
version: 1
dtype: float32
place: {cpu: "@**"}
rules:
  - {match: "@model.layers.*.self_attn", replace: KDeepseekV2Attention, kwargs: {absorb_for_prefill: auto}}
  - {match: "@model.layers.*", replace: KDecoderLayer, kwargs: {kv_dtype: float32}}
"""


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("deepseek")])
def test_a_prompt_by_the_attention_s_module_and_decoding_by_the_layer_share_one_cache(family, caplog) -> None:
    model = random_model(family)
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight.mul_(20)  # so that the rotated keys decide what is attended to
    ours, cache = fused(model, OVER_ATTENTION), DynamicCache(config=model.config)
    ids = torch.arange(40).view(1, 40) * 7 % 96
    with torch.no_grad():
        pieces = [ours(piece, cache=cache).logits for piece in ids.split([25, 1, 1, 12, 1], dim=1)]
        expected = model(ids).logits
    assert_no_fallback(caplog)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-4)
