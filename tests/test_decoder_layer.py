"""KDecoderLayer against transformers' own layers, on small random models in float32."""

import copy
import logging
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.auto import CONFIG_MAPPING

import ktopt
from ktopt.cache.growing import GrowingLayer, GrowingSlidingLayer, growing_layer
from ktopt.diagnostics import KtoptError
from ktopt.kernels import cpu
from ktopt.operators.modules.masks import first_tokens
from ktopt.source import SourceFile

pytestmark = [
    pytest.mark.skipif(not cpu.available()[0], reason="the CPU kernels were not built"),
    pytest.mark.usefixtures("one_thread"),
]

RULES = """
version: 1
dtype: float32
place: {cpu: "@**"}
rules:
  - {match: "@model.layers.*", replace: KDecoderLayer, kwargs: {kv_dtype: float32}}
"""
SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "attn_implementation": "sdpa",
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
    "n_routed_experts": 8, "num_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "llama with biases": {"attention_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 56},
    "qwen3_moe": {
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | {"q_lora_rank": 24},
    "deepseek_v3 without low rank": LATENT | {"q_lora_rank": None, "rope_interleave": False},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
TEXT = torch.randint(0, 96, (1, 23), generator=torch.Generator().manual_seed(3))


def random_model(family: str, **changes):
    config = CONFIG_MAPPING[family.split()[0]](**{**SHAPE, **FAMILIES[family], **changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, std=0.2)
        if name.endswith("norm.weight") and "gemma" not in family:
            parameter.data += 1
    return model.requires_grad_(False)


def fused(model, rules: str = RULES):
    return ktopt.apply(SourceFile("rules.yaml", rules), copy.deepcopy(model))


@pytest.fixture(params=FAMILIES)
def pair(request):
    """A random model and its fused counterpart."""
    model = random_model(request.param)
    return model, fused(model)


def difference(a, b) -> float:
    return float((a - b).abs().max())


def assert_no_fallback(caplog):
    assert not [r.message for r in caplog.records if "as transformers has it" in r.message]


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


class TestFallingBack:
    """Where the kernels can't do what is asked for, transformers' forward runs, and the log says why."""

    @pytest.fixture(autouse=True)
    def forget(self):
        from ktopt.operators.modules import decoder_layer

        decoder_layer._say.cache_clear()

    def reasons(self, caplog):
        return " ".join(r.message for r in caplog.records)

    def test_for_gradients(self, caplog):
        model = random_model("qwen2")
        ours = fused(model)
        embeddings = model.model.embed_tokens(TEXT).requires_grad_()
        ours(inputs_embeds=embeddings).logits.sum().backward()
        assert embeddings.grad.abs().sum() > 0
        assert "gradient" in self.reasons(caplog)

    def test_for_hooks_that_come_later_and_only_while_they_are_there(self, caplog):
        ours = fused(random_model("llama"))
        seen = []
        handle = ours.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, given, out: seen.append(out.shape))
        ours(TEXT)
        assert len(seen) == 1
        assert "hook" in self.reasons(caplog)
        handle.remove()
        ours(TEXT)
        assert len(seen) == 1

    def test_for_a_forward_set_on_the_layer_itself(self):
        model = random_model("llama")
        ours = fused(model)
        ours(TEXT)
        for each in (model, ours):
            layer = each.model.layers[1]
            layer.forward = lambda hidden_states, *args, own=layer.forward, **kwargs: own(hidden_states * 0.5, *args, **kwargs)
        assert difference(ours(TEXT).logits, model(TEXT).logits) < 2e-5

    def test_for_a_gradient_that_only_a_weight_asks_for(self):
        model = random_model("qwen3_moe")
        ours = fused(model)
        ours(TEXT)
        for each in (model, ours):
            each.model.layers[0].post_attention_layernorm.weight.requires_grad_()
            each(TEXT).logits.square().sum().backward()
        theirs, made = (each.model.layers[0].post_attention_layernorm.weight.grad for each in (model, ours))
        assert difference(made, theirs) < 1e-3 * float(theirs.abs().max())

    def test_for_dropout_in_training(self, caplog):
        ours = fused(random_model("llama", attention_dropout=0.5)).train()
        torch.manual_seed(0)
        assert difference(ours(TEXT).logits, ours(TEXT).logits) > 1e-3
        assert "dropout" in self.reasons(caplog)

    def test_for_another_attention_function(self, caplog):
        from transformers import AttentionInterface

        def first_value(module, query, key, value, mask, **kwargs):
            return value[:, :, :1].repeat_interleave(query.shape[1] // value.shape[1], 1).expand_as(query).transpose(1, 2), None

        AttentionInterface.register("first_value", first_value)
        model = random_model("llama")
        ours = fused(model)
        for each in (model, ours):
            each.set_attn_implementation("first_value")
        assert difference(ours(TEXT).logits, model(TEXT).logits) < 2e-5
        assert "first_value" in self.reasons(caplog)

    def test_for_arguments_that_change_attention(self, caplog):
        model = random_model("llama")
        ours = fused(model)
        assert difference(ours(TEXT, is_causal=False).logits, model(TEXT, is_causal=False).logits) < 2e-5
        assert "is_causal" in self.reasons(caplog)

    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "deepseek_v3"])
    def test_for_sequences_packed_into_one(self, family):
        model = random_model(family)
        positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
        made, expected = (each(TEXT[:, :16], position_ids=positions, use_cache=False).logits for each in (fused(model), model))
        assert difference(made, expected) < 2e-5

    def test_for_a_mask_that_weakens_scores(self, caplog):
        model = random_model("llama")
        mask = torch.zeros(1, 1, 23, 23).masked_fill(~torch.tril(torch.ones(23, 23, dtype=torch.bool)), torch.finfo().min)
        mask[..., 10:, 3] = -1.0
        assert difference(fused(model)(TEXT, attention_mask=mask).logits, model(TEXT, attention_mask=mask).logits) < 2e-5
        assert "weakens" in self.reasons(caplog)

    def test_for_weights_that_are_not_there(self, caplog):
        ours = fused(random_model("llama"))
        ours(TEXT)
        ours.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.empty(80, 64, device="meta"), requires_grad=False)
        ours(TEXT)
        assert "weights aren't there" in self.reasons(caplog)

    @pytest.mark.parametrize("width", [1, 32, 128])
    def test_for_inputs_of_another_width(self, width, caplog):
        ours = fused(random_model("llama"))
        x = torch.randn(1, 4, width)
        if width == 1:
            assert ours(inputs_embeds=x).logits.shape == (1, 4, 96)  # transformers spreads it out
        else:
            with pytest.raises(RuntimeError):
                ours(inputs_embeds=x)
        assert f"shape [1, 4, {width}]" in self.reasons(caplog)

    def test_for_positions_of_other_tokens(self):
        ours = fused(random_model("llama"))
        with pytest.raises(RuntimeError):
            ours(TEXT, position_ids=torch.arange(3)[None])

    def test_for_a_cache_of_another_model(self):
        small, large = random_model("qwen3"), random_model("qwen3", head_dim=48)
        cache = DynamicCache()
        fused(large)(TEXT, cache=cache)
        with pytest.raises(RuntimeError):
            fused(small)(TEXT, cache=cache)

    def test_for_classes_with_a_forward_of_their_own(self, caplog):
        model = random_model("llama")
        ours = fused(model)
        norm = type(model.model.norm)
        tripled = type("TripledRMSNorm", (norm,), {"forward": lambda self, x: norm.forward(self, x) * 3, "__module__": "mine"})
        for each in (model, ours):
            made = tripled(64)
            made.weight.data.copy_(model.model.layers[0].input_layernorm.weight)
            each.model.layers[0].input_layernorm = made.requires_grad_(False)
        assert difference(ours(TEXT).logits, model(TEXT).logits) < 2e-5
        assert "forward of its own" in self.reasons(caplog)

    def test_for_children_that_were_replaced(self):
        model = random_model("llama")
        ours = fused(model)
        before = ours(TEXT).logits
        for each in (model, ours):
            each.model.layers[0].mlp.down_proj = torch.nn.Sequential(each.model.layers[0].mlp.down_proj, torch.nn.Sigmoid())
        assert difference(ours(TEXT).logits, model(TEXT).logits) < 2e-5
        assert difference(ours(TEXT).logits, before) > 1e-3

    def test_for_attention_that_is_asked_for(self):
        model = random_model("llama", attn_implementation="eager")
        ours = fused(model)
        for _ in range(2):  # the second time transformers' hooks are there already
            made, expected = ours(TEXT, output_attentions=True).attentions, model(TEXT, output_attentions=True).attentions
            assert all(difference(a, b) < 1e-5 for a, b in zip(made, expected, strict=True))
        assert difference(ours(TEXT).logits, model(TEXT).logits) < 2e-5

    def test_for_a_static_cache(self, caplog):
        model = random_model("qwen3")
        ours = fused(model)
        cache = StaticCache(config=model.config, max_cache_len=40)
        assert difference(ours(TEXT, cache=cache).logits, model(TEXT).logits) < 2e-5
        assert "StaticLayer" in self.reasons(caplog)

    def test_for_a_mask_with_holes(self, caplog):
        model = random_model("llama")
        ours = fused(model)
        mask = torch.tril(torch.ones(1, 1, 23, 23, dtype=torch.bool))
        mask[..., 10:, 4] = False
        assert difference(ours(TEXT, attention_mask=mask).logits, model(TEXT, attention_mask=mask).logits) < 2e-5
        assert "more than causality" in self.reasons(caplog)


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


class TestGrowingLayers:
    """The cache's layers answer as transformers' own do."""

    def states(self, tokens, seed=0):
        torch.manual_seed(seed)
        return torch.randn(2, 3, tokens, 16), torch.randn(2, 3, tokens, 16)

    @pytest.mark.parametrize("window", [0, 6])
    def test_through_every_call(self, window):
        config = CONFIG_MAPPING["gemma3_text"](
            **SHAPE | {"sliding_window": 6, "layer_types": ["sliding_attention" if window else "full_attention"] * 3}
        )
        theirs, cache = DynamicCache(config=config), DynamicCache(config=config)
        ours = growing_layer(cache, 0, None)
        assert type(ours) is (GrowingSlidingLayer if window else GrowingLayer)
        for step, tokens in enumerate((5, 1, 1, 1, 300, 1, 7)):
            given = self.states(tokens, step)
            assert theirs.layers[0].get_mask_sizes(tokens) == ours.get_mask_sizes(tokens)
            for a, b in zip(ours.update(*given), theirs.update(*given, 0), strict=True):
                assert torch.equal(a, b)
            for call in ("get_seq_length", "get_max_length"):
                assert getattr(ours, call)() == getattr(theirs.layers[0], call)()
        order = torch.tensor([1, 0])
        for each in (ours, theirs.layers[0]):
            each.reorder_cache(order)
            each.batch_repeat_interleave(2)
            each.batch_select_indices(torch.tensor([0, 3, 1]))
        given = tuple(s[:1].expand(3, -1, -1, -1) for s in self.states(2, 9))
        for a, b in zip(ours.update(*given), theirs.update(*given, 0), strict=True):
            assert torch.equal(a, b)

    def test_cropping_takes_back_what_came_last(self):
        ours = GrowingLayer()
        keys, values = self.states(9)
        ours.update(keys, values)
        ours.crop(-4)
        assert torch.equal(ours.keys, keys[:, :, :5])
        assert torch.equal(ours.update(*self.states(1))[0][:, :, :5], keys[:, :, :5])

    def test_a_window_that_has_moved_on_can_not_be_taken_back(self):
        ours = GrowingSlidingLayer(4)
        for step in range(600):
            ours.update(*self.states(1, step))
        ours.crop(-1)
        with pytest.raises(RuntimeError, match="window of 4"):
            ours.crop(-500)

    def test_keys_and_values_can_be_set_one_after_the_other(self):
        ours = GrowingLayer()
        keys, values = self.states(9)
        ours.update(keys, values)
        ours.keys = ours.keys[:, :, -4:]
        ours.values = ours.values[:, :, -4:]
        assert torch.equal(ours.values, values[:, :, -4:])
        made = ours.update(*self.states(1, 1))[1]
        assert torch.equal(made[:, :, :4], values[:, :, -4:])

    def test_a_cache_in_use_is_taken_over(self):
        cache = DynamicCache()
        keys, values = self.states(5)
        cache.update(keys, values, 0)
        assert torch.equal(growing_layer(cache, 0, None).keys, keys)
        assert type(cache.layers[0]) is GrowingLayer


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
    assert len([r for r in caplog.records if "as transformers has it" in r.message]) <= 1
