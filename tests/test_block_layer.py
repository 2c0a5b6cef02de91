"""A layer that keeps blocks, by itself: what it attends to, compared with torch's attention under the mask of exactly that."""

import copy
import itertools
import pickle

import pytest
import torch
from blocked_models import ANCHORS, OneLayer
from layer_fixtures import difference

from ktopt.config import CacheSettings
from ktopt.diagnostics import KtoptError
from ktopt.operators.modules import block_choice
from ktopt.operators.modules.block_layer import BlockLayer

pytestmark = pytest.mark.usefixtures("one_thread")


def seen_by(layer: BlockLayer, picks_RK, tokens: int) -> torch.Tensor:
    """The tokens (R, 1, N) that a decoding token may attend to: the sink, the picks, and what wasn't in a block."""
    shared = layer.shared
    rows, total = layer.rows, tokens
    blocks = torch.zeros(rows, total // shared.tokens + 1, dtype=torch.bool)
    blocks[:, : shared.sinks] = True
    if picks_RK is not None:
        blocks.scatter_(1, picks_RK.long() + shared.sinks, True)
    else:
        blocks[:] = True
    seen = blocks.repeat_interleave(shared.tokens, 1)[:, :total]
    seen[:, layer.gone_before * shared.tokens :] = True
    return seen.unsqueeze(1)


@pytest.fixture
def chosen(monkeypatch):
    """What each layer chooses from now on, last choice last, with the blocks that had left its window by then."""
    from ktopt.operators.modules import block_attention

    made = []

    def choose(held, q_RHD, ends):
        picks = block_choice.choose(held, q_RHD, ends)
        held.gone_before = held.gone
        made.append(picks)
        return picks

    monkeypatch.setattr(block_attention, "choose", choose)
    return made


@pytest.mark.parametrize("mode", ["SEPARATE", "SHARED"])
@pytest.mark.parametrize("anchor_type", ANCHORS)
def test_a_token_attends_to_the_sink_the_window_and_the_chosen_blocks(anchor_type, mode, chosen):
    one = OneLayer(anchor_type=anchor_type, second_select_num=3, head_select_mode=mode, token_step=3)
    one.give(125)
    for _ in range(40):
        (out,), query = one.give(1)
        seen = seen_by(one.layers[0], chosen[-1], one.keys.shape[2]).view(1, 2, 1, -1).repeat_interleave(2, 1)
        assert chosen[-1] is not None
        assert chosen[-1].shape == (2, 3)
        assert difference(out, one.dense(query, seen)) < 1e-5
    if mode == "SHARED":
        assert all(torch.equal(*picks) for picks in chosen)


def test_shares_count_what_the_sink_and_the_window_get(monkeypatch):
    one = OneLayer(anchor_type="KEY_INT4", second_select_num=3)
    one.give(125)
    layer, given = one.layers[0], []
    select = layer.anchors.select
    monkeypatch.setattr(layer.anchors, "select", lambda *args, rest_RH, **kwargs: given.append(rest_RH) or select(*args, **kwargs))
    for _ in range(20):
        gone = layer.gone * layer.shared.tokens
        _, query = one.give(1)
        keys = torch.cat((one.keys[:, :, : layer.sink_tokens], one.keys[:, :, gone:]), 2)
        expected = (query.unflatten(1, (2, 2))[..., 0, :] @ keys.mT * one.scale).logsumexp(-1)
        torch.testing.assert_close(given[-1], expected[0], rtol=1e-4, atol=1e-4)


def test_a_choice_holds_for_token_step_tokens(chosen):
    one = OneLayer(second_select_num=2, token_step=4)
    one.give(154)
    for _ in range(12):
        one.give(1)
    same = [torch.equal(a, b) for a, b in itertools.pairwise(chosen)]
    assert all(same[i] for i in range(11) if i % 4 != 3)
    assert not all(same)


def test_the_token_at_hand_is_always_attended_to(chosen):
    one = OneLayer(second_select_num=1, token_step=100, layers=3, layer_step=2, dense_layer_num=1)
    one.give(128)
    for _ in range(20):
        outs, query = one.give(1)
        assert one.layers[0].window.tokens >= 8
        for out, layer, picks in zip(outs, one.layers, chosen[-3:], strict=True):
            seen = seen_by(layer, picks, one.keys.shape[2]).view(1, 2, 1, -1).repeat_interleave(2, 1)
            assert bool(seen[..., -8:].all())
            assert difference(out, one.dense(query, seen)) < 1e-5


def test_layers_of_a_step_share_the_first_ones_choice(chosen):
    one = OneLayer(second_select_num=2, layers=6, layer_step=3, dense_layer_num=1)
    one.give(144)
    one.give(1)
    assert chosen[0] is None
    assert chosen[1] is chosen[2] is chosen[3]
    assert chosen[4] is chosen[5]
    assert [layer.anchors is not None for layer in one.layers] == [False, True, False, False, True, False]


def test_preselected_blocks_are_those_that_the_prompts_end_attends_to(chosen):
    one = OneLayer(second_select_num=2, preselect_block=True, preselect_block_count=4, local_windows_len=16)
    (_out,), query = one.give(200)
    layer = one.layers[0]
    one.give(1)
    scores = query[:, :, -128:].unflatten(1, (2, 2)) @ one.keys[:, :, None, :200].mT * one.scale
    own = torch.arange(72, 200)[:, None]
    weights = scores.masked_fill(torch.arange(200) > own, float("-inf")).softmax(-1).sum((2, 3))[0]
    blocks = layer.choice.shortlist_RM.shape[1]
    pooled = torch.stack([weights[:, 64 + 8 * b - 2 : 64 + 8 * b + 10].mean(1) for b in range(blocks)], 1)
    assert torch.equal(layer.choice.shortlist_RM, torch.zeros_like(pooled, dtype=bool).scatter_(1, pooled.topk(4).indices, True))
    assert bool(layer.choice.shortlist_RM.gather(1, chosen[-1].long()).all())
    for _ in range(60):
        one.give(1)
        assert bool(((chosen[-1] >= blocks) | layer.choice.shortlist_RM.gather(1, chosen[-1].long().clamp(max=blocks - 1))).all())


def test_dynamic_anchors_are_the_keys_that_the_prompts_end_attends_to():
    one = OneLayer(anchor_type="DYNAMIC", second_select_num=2)
    _, query = one.give(128)
    one.give(1)
    scores = query.unflatten(1, (2, 2)) @ one.keys[:, :, None, :128].mT * one.scale
    weights = scores.masked_fill(torch.arange(128) > torch.arange(128)[:, None], float("-inf")).softmax(-1).sum((2, 3))[0]
    kept = one.keys[0, :, 64:].half()
    for row in range(2):
        for block in range(5):
            best = int(weights[row, 64 + 8 * block : 72 + 8 * block].argmax())
            anchor = one.layers[0].anchors.scores(torch.eye(16)[:1].expand(2, 1, 16).contiguous(), 1.0)[row, block]
            assert float(anchor) == pytest.approx(float(kept[row, 8 * block + best, 0]), abs=1e-3)


@pytest.mark.parametrize("pieces", [(150,), (1, 149), (7, 114, 29), (33, 77, 40)])
@pytest.mark.parametrize("chunk_size", [5, 8, 4096])
def test_a_prompt_in_any_chunks_is_causal_attention(pieces, chunk_size):
    one = OneLayer(batch=2, chunk_size=chunk_size, second_select_num=1)
    for tokens in pieces:
        (out,), query = one.give(tokens)
        assert difference(out, one.dense(query, one.causal(tokens))) < 1e-5
    assert difference(one.layers[0].keys, one.keys) == difference(one.layers[0].values, one.values) == 0


def test_sequences_with_padding_see_nothing_of_it_and_keep_their_own_first_block(chosen):
    one = OneLayer(batch=3, second_select_num=3)
    starts = torch.tensor([0, 21, 101])
    (out,), query = one.give(160, starts)
    token = torch.arange(160)
    seen = one.causal(160) & (token >= starts.view(3, 1, 1, 1))
    real = token >= starts[:, None]
    assert difference(out[real], one.dense(query, seen)[real]) < 1e-5
    for _ in range(30):
        (out,), query = one.give(1, starts)
        total = one.keys.shape[2]
        seen = seen_by(one.layers[0], chosen[-1], total).view(3, 2, 1, -1).repeat_interleave(2, 1)
        seen = seen & (torch.arange(total) >= starts.view(3, 1, 1, 1))
        assert bool(seen[1, :, :, 21:64].all())
        assert bool(seen[2, :, :, 101:104].all())
        assert difference(out, one.dense(query, seen)) < 1e-5


@pytest.mark.parametrize("kept", [159, 152, 144, 141, 100, 81, 80, 79, 72, 65, 64, 63, 8, 3, 0])
def test_tokens_taken_back_are_gone_and_the_rest_goes_on(kept):
    one = OneLayer(batch=2)
    one.give(160)
    one.layers[0].crop(kept - 160)
    one.keys, one.values = one.keys[:, :, :kept], one.values[:, :, :kept]
    assert one.layers[0].get_seq_length() == kept
    assert difference(one.layers[0].keys, one.keys) == 0 if kept else True
    for tokens in (1, 90, 1, 1, 9, 1):
        (out,), query = one.give(tokens)
        assert difference(out, one.dense(query, one.causal(tokens))) < 1e-5


def test_every_layer_gives_the_same_tokens_back_before_blocks_are_forgotten():
    one = OneLayer(layers=3)
    one.give(160)
    for layer in one.layers:
        layer.crop(-40)
    one.keys, one.values = one.keys[:, :, :120], one.values[:, :, :120]
    outs, query = one.give(50)
    for out in outs:
        assert difference(out, one.dense(query, one.causal(50))) < 1e-5


@pytest.mark.parametrize(("kv_type", "error"), [("Q8_0", 0.02), ("Q4_0", 0.3), ("BF16", 0.02), ("FP16", 2e-3), (None, 0.02)])
def test_narrower_types_cost_their_rounding(kv_type, error):
    one = OneLayer(kv_type=kv_type, block_size=32, local_windows_len=32, dim=32)
    one.give(200)
    (out,), query = one.give(1)
    assert 0 < difference(out, one.dense(query, one.causal(1))) < error


def test_small_blocks_have_as_many_sinks_as_make_64_tokens(chosen):
    one = OneLayer(block_size=16, local_windows_len=16, second_select_num=1)
    one.give(200)
    (out,), query = one.give(1)
    assert one.shared.sinks == 4
    assert chosen[-1].shape == (2, 1)
    seen = seen_by(one.layers[0], chosen[-1], 201).view(1, 2, 1, -1).repeat_interleave(2, 1)
    assert bool(seen[..., :64].all())
    assert difference(out, one.dense(query, seen)) < 1e-5


def test_sparse_prefill_attends_to_the_sink_the_window_and_as_many_blocks_as_asked_for():
    one = OneLayer(prefill="sparse", second_select_num=64, layers=3, layer_step=2, chunk_size=32)
    outs, query = one.give(200)
    assert all(difference(out, one.dense(query, one.causal(200))) < 1e-5 for out in outs)
    few = OneLayer(prefill="sparse", second_select_num=2, layers=3, layer_step=2, chunk_size=32)
    outs, query = few.give(200)
    exact = few.dense(query, few.causal(200))
    assert difference(outs[0][:, :96], exact[:, :96]) < 1e-5  # so far two blocks are all there are
    assert difference(outs[0], exact) > 1e-3
    assert torch.equal(outs[0], outs[1])


def test_each_piece_of_a_sparse_prompt_attends_to_the_blocks_chosen_for_it(monkeypatch):
    from ktopt.operators.modules import block_reading

    made = []

    def choose(held, q_BSND, position):
        picks = block_choice.choose_for_prompt(held, q_BSND, position)
        made.append((position, q_BSND.shape[1], picks, held.gone))
        return picks

    monkeypatch.setattr(block_reading, "choose_for_prompt", choose)
    monkeypatch.setattr(block_reading, "PIECE_TOKENS", 20)
    one = OneLayer(prefill="sparse", second_select_num=3, chunk_size=50)
    (out,), query = one.give(220)
    assert sum(picks is not None for _, _, picks, _ in made) > 3
    for position, tokens, picks, gone in made:
        one.layers[0].gone_before = gone
        seen = seen_by(one.layers[0], picks, 220).view(1, 2, 1, -1).repeat_interleave(2, 1)
        seen = seen & (torch.arange(220) <= torch.arange(position, position + tokens)[:, None])
        expected = one.dense(query[:, :, position : position + tokens], seen)
        assert difference(out[:, position : position + tokens], expected) < 1e-5


def test_more_tokens_than_the_cache_holds_are_refused_before_any_work():
    one = OneLayer(max_seq_len=80)
    with pytest.raises(KtoptError, match=r"holds 80 tokens \(max_seq_len\): 81 are too many.*Raise max_seq_len"):
        one.give(81)
    assert one.layers[0].get_seq_length() == 0
    one.keys = one.values = torch.empty(1, 2, 0, 16)
    one.give(80)
    with pytest.raises(KtoptError, match="80 are there, and 1 more"):
        one.give(1)


def test_blocks_of_one_token_may_have_its_least_and_greatest_numbers():
    one = OneLayer(block_size=1, local_windows_len=1, second_select_num=400)
    for tokens in (150, 1, 1):
        (out,), query = one.give(tokens)
        assert difference(out, one.dense(query, one.causal(tokens))) < 1e-5


def test_settings_that_cant_stand_together_are_refused():
    with pytest.raises(KtoptError, match=r"QUEST.*anchor_num: 2.*not 3"):
        OneLayer(anchor_type="QUEST", anchor_num=3)
    with pytest.raises(KtoptError, match="cache holds 9"):
        OneLayer(max_seq_len=64, local_windows_len=64)


def test_a_budget_that_cant_hold_a_step_is_refused_with_the_numbers():
    one = OneLayer(max_seq_len=4096, second_select_num=200)
    one.shared.memory = type(one.shared.memory)(cpu_memory_size_GB=0)
    with pytest.raises(KtoptError, match=r"one layer's step needs 200 blocks of 2 rows.*cpu_memory_size_GB"):
        one.give(1)


def test_what_a_cache_of_blocks_cant_do_is_said():
    one = OneLayer()
    one.give(20)
    for call, said in (
        (lambda: one.layers[0].reorder_cache(torch.tensor([0])), "beam search"),
        (lambda: one.layers[0].batch_select_indices(torch.tensor([0])), "can't be chosen"),
        (lambda: one.layers[0].batch_repeat_interleave(2), "can't be repeated"),
        (lambda: copy.deepcopy(one.layers[0]), "can't be copied"),
        (lambda: pickle.dumps(one.layers[0]), "can't be pickled"),
    ):
        with pytest.raises(KtoptError, match=said):
            call()


def test_numbers_beyond_float16_are_refused_where_it_holds_the_window():
    one = OneLayer(kv_type="FP16")
    one.numbers = lambda *shape: torch.full(shape, 7e4)
    with pytest.raises(KtoptError, match=r"float16.*kv_type"):
        one.give(3)


@pytest.mark.parametrize("settings", [{}, {"prefill": "sparse"}, {"preselect_block": True, "preselect_block_count": 20}])
@pytest.mark.parametrize("anchor_type", ["DYNAMIC", "KEY_INT4"])
def test_with_most_blocks_on_disk_all_is_as_in_memory(tmp_path, anchor_type, settings):
    given = {"anchor_type": anchor_type, "second_select_num": 6, "layers": 3, "chunk_size": 64, "dense_layer_num": 1, **settings}
    roomy, tight = OneLayer(**given), OneLayer(**given)
    gigabytes = 0.00065 if anchor_type == "KEY_INT4" else 0.0005
    tight.shared.memory = CacheSettings(cpu_memory_size_GB=gigabytes, disk_path=str(tmp_path))
    for tokens in (200, 1, 150, *[1] * 30):
        expected, made = roomy.give(tokens)[0], tight.give(tokens)[0]
        assert all(difference(a, b) < 1e-5 for a, b in zip(made, expected, strict=True))  # tiles of other sizes
    counts = tight.shared.statistics
    assert counts.disk_bytes > counts.host_bytes > 0 < counts.misses
    for one in (roomy, tight):
        for layer in one.layers:
            layer.crop(-250)
    assert all(difference(a, b) < 1e-5 for a, b in zip(tight.give(1)[0], roomy.give(1)[0], strict=True))
    tight.shared.close()
    assert not any(tmp_path.rglob("*.block"))


@pytest.mark.parametrize(("anchor_type", "memory"), [("QUEST", 0.0005), ("KEY_INT4", 0.0008)])
def test_a_token_attends_in_the_same_order_wherever_its_blocks_come_from(anchor_type, memory, tmp_path):
    """To the last bit: what an 8-bit product rounds next would make more of a difference."""
    given = {"anchor_type": anchor_type, "second_select_num": 6, "layers": 3, "chunk_size": 64, "dense_layer_num": 0}
    roomy, tight = OneLayer(**given), OneLayer(**given)
    tight.shared.memory = CacheSettings(cpu_memory_size_GB=memory, disk_path=str(tmp_path))
    for _ in range(400):
        expected, made = roomy.give(1)[0], tight.give(1)[0]
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert tight.shared.statistics.misses > 0
    tight.shared.close()
