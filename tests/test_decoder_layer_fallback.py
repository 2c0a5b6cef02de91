"""Where the kernels can't make what a fused layer is asked for, transformers' forward runs, and the log says why."""

import pytest
import torch
from layer_fixtures import TEXT, difference, fused, random_model
from transformers import DynamicCache, StaticCache

from ktopt.kernels import cpu

pytestmark = [
    pytest.mark.skipif(not cpu.available()[0], reason="the CPU kernels were not built"),
    pytest.mark.usefixtures("one_thread"),
]


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
