"""The cache's layers that grow in place answer as transformers' own do."""

import pytest
import torch
from layer_fixtures import SHAPE
from transformers import DynamicCache
from transformers.models.auto import CONFIG_MAPPING

from ktopt.cache.growing import GrowingLayer, GrowingSlidingLayer, growing_layer


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
