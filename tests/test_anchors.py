"""What blocks are known by: scores against what each type says it is, computed here token by token, and the choice of blocks; by
torch and on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from ktopt.cache.blocks.layout import ANCHOR_TYPES, anchor_bytes
from ktopt.diagnostics import KtoptError
from ktopt.kernels import anchors, cpu
from ktopt.kernels import anchors_reference as reference
from ktopt.kernels.anchors import Anchors

pytestmark = pytest.mark.usefixtures("one_thread", "way")

ROWS, HEADS, TOKENS, DIM, BLOCKS = 4, 3, 32, 64, 24
SCALE = DIM**-0.5


@pytest.fixture(params=["torch", *cpu.ISAS])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What computes: torch, or the kernels on one instruction set."""
    if request.param == "torch":
        monkeypatch.setattr(anchors, "refuses", lambda _storage: "a test wants torch")
        yield "torch"
        return
    if not cpu.available()[0] or request.param not in cpu.isas():
        pytest.skip(f"no kernels for {request.param} here")
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(None)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_keys(blocks: int = BLOCKS, tokens: int = TOKENS, dim: int = DIM, rows: int = ROWS) -> torch.Tensor:
    """Keys whose blocks differ, with a channel that stands far out as models with biases have it."""
    keys = numbers(rows, blocks, tokens, dim) + numbers(rows, blocks, 1, dim, seed=1)
    keys[..., 3] += 40
    return keys


def made(anchor_type: str, keys_RKTD: torch.Tensor, anchor_num: int = 2, importance: torch.Tensor | None = None) -> Anchors:
    rows, blocks, tokens, dim = keys_RKTD.shape
    found = Anchors(anchor_type, anchor_num, rows, blocks, tokens, dim)
    found.add(keys_RKTD, importance)
    return found


def token_scores(keys_RKTD: torch.Tensor, q_RHD: torch.Tensor) -> torch.Tensor:
    """q.k * scale in float64 (R, H, K, T)."""
    return torch.einsum("rhd,rktd->rhkt", q_RHD.double(), keys_RKTD.double()) * SCALE


def masses(keys_RKTD: torch.Tensor, q_RHD: torch.Tensor) -> torch.Tensor:
    """The share of the softmax that each block has, summed over the heads (R, K)."""
    return token_scores(keys_RKTD, q_RHD).flatten(2).softmax(2).unflatten(2, keys_RKTD.shape[1:3]).sum((1, 3))


def close(found: torch.Tensor, expected: torch.Tensor, relative: float = 2e-3) -> bool:
    """Anchors are float16."""
    return bool((found - expected).abs().max() <= relative * expected.abs().max())


def test_the_mean_key_stands_for_a_block() -> None:
    keys, q = some_keys(), numbers(ROWS, HEADS, DIM, seed=2)
    assert close(made("BLOCK_MEAN", keys).scores(q, SCALE), token_scores(keys, q).mean(3).sum(1))


def test_the_largest_numbers_of_channels_stand_for_a_block_also_where_they_are_negative() -> None:
    keys, q = some_keys() - 100, numbers(ROWS, HEADS, DIM, seed=2)
    assert close(made("BLOCK_MAX", keys).scores(q, SCALE), token_scores(keys.amax(2, keepdim=True), q)[..., 0].sum(1))


def test_quest_bounds_every_token_from_above() -> None:
    keys = some_keys() * torch.linspace(1e-9, 500, BLOCKS)[:, None, None]  # from below float16's smallest to some 20,000
    q = numbers(ROWS, HEADS, DIM, seed=2)
    scores = made("QUEST", keys).scores(q, SCALE)
    low, high = (q[:, :, None] * side[:, None] for side in (keys.amin(2), keys.amax(2)))
    assert close(scores, torch.maximum(low, high).sum((1, 3)) * SCALE)
    sides = made("QUEST", keys).storage.anchors.float()
    assert (sides[:, :, 0] <= keys.amin(2)).all()
    assert (sides[:, :, 1] >= keys.amax(2)).all()
    assert (scores * (1 + 1e-5) >= token_scores(keys, q).sum(1).amax(2)).all()


@pytest.mark.parametrize("kept", [1, 3, TOKENS])
def test_keys_at_even_distances_stand_for_a_block(kept: int) -> None:
    keys, q = some_keys(), numbers(ROWS, HEADS, DIM, seed=2)
    at = [i * TOKENS // kept for i in range(kept)]
    assert close(made("FIXED", keys, kept).scores(q, SCALE), token_scores(keys, q)[..., at].amax(3).sum(1))


def test_the_most_important_keys_stand_for_a_block() -> None:
    keys, q = some_keys(), numbers(ROWS, HEADS, DIM, seed=2)
    importance = numbers(ROWS, BLOCKS, TOKENS, seed=3)
    at = importance.topk(2, dim=2).indices[:, None].expand(-1, HEADS, -1, -1)
    index = made("DYNAMIC", keys, 2, importance)
    assert close(index.scores(q, SCALE), token_scores(keys, q).gather(3, at).amax(3).sum(1))


def test_without_importance_dynamic_anchors_are_fixed_ones() -> None:
    keys, q = some_keys(), numbers(ROWS, HEADS, DIM, seed=2)
    assert made("DYNAMIC", keys).scores(q, SCALE).equal(made("FIXED", keys).scores(q, SCALE))


@pytest.mark.parametrize("tokens", [32, 20])
@pytest.mark.parametrize("dim", [64, 24])
def test_keys_in_4_bits_are_off_by_half_a_step(tokens: int, dim: int) -> None:
    keys = some_keys(tokens=tokens, dim=dim)
    found = reference.int4_keys(made("KEY_INT4", keys).storage, BLOCKS)
    off = reference.turned(keys - keys.mean(2, keepdim=True))
    step = (off.amax(3) - off.amin(3)) / 15
    assert (reference.turned(found - keys).abs().amax(3) <= step / 2 + 0.04).all()  # and by the roundings of 40 and of the step


@pytest.mark.parametrize("dim", [16, 24, 48, 64, 576])
def test_turning_leaves_products_as_they_are_and_spreads_a_channel(dim: int) -> None:
    a, b = numbers(7, dim), numbers(5, dim, seed=1)
    torch.testing.assert_close(reference.turned(a) @ reference.turned(b).T, a @ b.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reference.turned(reference.turned(a)), a, rtol=1e-4, atol=1e-5)
    size = reference.turn_size(dim)
    assert close(reference.turned(torch.eye(dim)[3]).abs()[:size], torch.full((size,), size**-0.5))


def test_a_channel_that_varies_much_costs_the_others_little() -> None:
    keys, q = numbers(ROWS, BLOCKS, TOKENS, DIM), numbers(ROWS, HEADS, DIM, seed=2)
    keys[..., 3] *= 30
    mean = keys.mean(2, keepdim=True)
    off = keys - mean
    low, step = off.amin(3, keepdim=True), (off.amax(3, keepdim=True) - off.amin(3, keepdim=True)) / 15
    plain = mean + ((off - low) / step).round() * step + low
    found = reference.int4_keys(made("KEY_INT4", keys).storage, BLOCKS)
    errors = [(token_scores(each, q) - token_scores(keys, q)).square().mean().sqrt() for each in (found, plain)]
    assert errors[0] < 0.8 * errors[1]
    whole = masses(keys, q)
    assert (made("KEY_INT4", keys).scores(q, SCALE) - whole).abs().mean() < 0.8 * (masses(plain, q) - whole).abs().mean()


def test_signs_are_of_the_turned_difference_to_the_mean_key() -> None:
    keys = some_keys(tokens=20, dim=24)
    found = reference.sign_keys(made("KEY_INT4", keys).storage, BLOCKS)
    mean = keys.mean(2, keepdim=True).half().float()
    off = reference.turned(keys - mean)
    expected = mean + reference.turned(torch.where(off >= 0, 1, -1) * off.abs().mean(3, keepdim=True))
    assert close(found, expected)


def test_keys_in_4_bits_tell_each_blocks_share_of_the_softmax() -> None:
    keys, q = some_keys(), numbers(ROWS, HEADS, DIM, seed=2) * 2
    assert (made("KEY_INT4", keys).scores(q, SCALE) - masses(keys, q)).abs().max() < 0.1 * masses(keys, q).max()


def test_shares_are_of_the_whole_softmax_where_the_rest_of_it_is_known() -> None:
    keys, q = some_keys(), numbers(ROWS, HEADS, DIM, seed=2) * 2
    beside = numbers(ROWS, 1, 50, DIM, seed=3) + 40 * torch.eye(DIM)[3]
    rest = token_scores(beside, q).flatten(2).logsumexp(2)
    shares = torch.cat((token_scores(keys, q).flatten(2), token_scores(beside, q).flatten(2)), 2).softmax(2)
    expected = shares[..., : BLOCKS * TOKENS].unflatten(2, (BLOCKS, TOKENS)).sum((1, 3))
    assert (made("KEY_INT4", keys).scores(q, SCALE, rest_RH=rest) - expected).abs().max() < 0.1 * expected.max()


@pytest.mark.parametrize("blocks", [BLOCKS, 200])
def test_a_head_that_looks_at_the_sink_leaves_the_choice_to_the_others(blocks: int) -> None:
    """Two heads of a row want other blocks; what the first gives to the blocks is little beside what it gives elsewhere."""
    keys = 0.1 * numbers(1, blocks, TOKENS, DIM)
    q = torch.eye(DIM)[None, :2] * 8
    keys[0, 5, :, 0] += 12
    keys[0, 11, :, 1] += 8
    index, nothing = made("KEY_INT4", keys), torch.full((1, 2), -math.inf)
    assert index.select(q, SCALE, 1).tolist() == [[5]]
    assert index.select(q, SCALE, 1, rest_RH=nothing).tolist() == [[5]]
    assert index.select(q, SCALE, 1, rest_RH=torch.tensor([[30.0, -math.inf]])).tolist() == [[11]]
    assert index.select(q, SCALE, 1, rest_RH=torch.tensor([[30.0, 30.0]])).tolist() == [[5]]


def test_only_the_shortlist_is_scored() -> None:
    index, q = made("KEY_INT4", some_keys(200)), numbers(ROWS, HEADS, DIM, seed=2)
    for count, least, most in ((3, 48, 80), (20, 60, 100)):
        scores = index.scores(q, SCALE, count)
        listed = scores.isfinite().sum(1)
        assert (listed >= least).all()
        assert (listed <= most).all()
        assert (scores.clamp_min(0).sum(1) - HEADS).abs().max() < 1e-5


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
def test_the_best_blocks_are_chosen_in_ascending_order(anchor_type: str) -> None:
    keys, q = some_keys(), numbers(ROWS, HEADS, DIM, seed=2)
    index = made(anchor_type, keys)
    picks = index.select(q, SCALE, 5)
    assert picks.dtype is torch.int32
    assert picks.equal(index.scores(q, SCALE, 5).topk(5).indices.sort(1).values.int())


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
def test_rows_of_a_sequence_choose_together_by_the_sum_of_their_scores(anchor_type: str) -> None:
    keys, q = some_keys(), numbers(ROWS, HEADS, DIM, seed=2)
    index = made(anchor_type, keys)
    picks = index.select(q, SCALE, 8, shared=2)  # KEY_INT4's shortlist is all 24 blocks
    together = index.scores(q, SCALE).view(2, 2, BLOCKS).sum(1)
    assert picks[0].equal(picks[1])
    assert picks[2].equal(picks[3])
    assert picks[::2].equal(together.topk(8).indices.sort(1).values.int())


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
@pytest.mark.parametrize("shared", [0, 2])
def test_only_allowed_blocks_are_chosen(anchor_type: str, shared: int) -> None:
    keys, q = some_keys(), numbers(ROWS, HEADS, DIM, seed=2)
    allowed = torch.zeros(ROWS, BLOCKS, dtype=torch.bool)
    allowed[:, 4:16] = True
    allowed[1, 10:] = False
    index = made(anchor_type, keys)
    picks = index.select(q, SCALE, 4, shared=shared, allowed_RM=allowed)
    assert picks.shape == (ROWS, 4)
    assert allowed.gather(1, picks.long()).all()
    if shared:
        assert picks[0].equal(picks[1])
    assert index.select(q, SCALE, 99, shared=shared, allowed_RM=allowed).shape == (ROWS, 6)


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
def test_of_equal_blocks_the_later_ones_are_chosen(anchor_type: str) -> None:
    keys = some_keys(1).expand(-1, BLOCKS, -1, -1)
    picks = made(anchor_type, keys).select(numbers(ROWS, HEADS, DIM, seed=2), SCALE, 3)
    assert picks.tolist() == [[BLOCKS - 3, BLOCKS - 2, BLOCKS - 1]] * ROWS


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
@pytest.mark.parametrize("count", [BLOCKS, BLOCKS + 7])
def test_all_blocks_are_the_choice_where_that_many_are_asked_for(anchor_type: str, count: int) -> None:
    picks = made(anchor_type, some_keys()).select(numbers(ROWS, HEADS, DIM, seed=2), SCALE, count)
    assert picks.tolist() == [list(range(BLOCKS))] * ROWS


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
def test_blocks_can_come_one_after_another_and_be_taken_back(anchor_type: str) -> None:
    keys, q = some_keys(), numbers(ROWS, HEADS, DIM, seed=2)
    whole, grown = made(anchor_type, keys), Anchors(anchor_type, 2, ROWS, BLOCKS, TOKENS, DIM)
    grown.add(keys[:, :7])
    grown.add(-keys[:, 7:12])
    grown.truncate(7)
    assert grown.blocks == 7
    assert grown.scores(q, SCALE).shape == (ROWS, 7)
    for block in range(7, BLOCKS):
        grown.add(keys[:, block : block + 1])
    assert grown.scores(q, SCALE).equal(whole.scores(q, SCALE))


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
def test_memory_is_what_the_layout_says(anchor_type: str) -> None:
    assert Anchors(anchor_type, 3, 2, 5, 20, 24).nbytes == 2 * 5 * anchor_bytes(anchor_type, 3, 20, 24)


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
@pytest.mark.parametrize("wrong", [70000.0, -70000.0, math.inf, math.nan])
def test_numbers_beyond_float16_are_refused_and_nothing_is_added(anchor_type: str, wrong: float) -> None:
    keys = some_keys(3)
    keys[1, 2, 7, 5] = wrong
    index = Anchors(anchor_type, 2, ROWS, 9, TOKENS, DIM)
    index.add(some_keys(4))
    with pytest.raises(KtoptError, match=rf"token 7 in block 6, row 1, has {wrong:g}"):
        index.add(keys)
    assert index.blocks == 4


def test_what_does_not_fit_is_refused_with_the_sizes() -> None:
    index, q = made("QUEST", some_keys()), numbers(ROWS, HEADS, DIM)
    for message, call in {
        "MEAN is no type of anchors": lambda: Anchors("MEAN", 1, 1, 1, 1, 1),
        "can't keep 33 keys of a block of 32": lambda: Anchors("FIXED", 33, 1, 1, 32, 64),
        "no anchors of 1 blocks of 0 tokens": lambda: Anchors("QUEST", 2, 1, 1, 0, 64),
        "are no blocks of 32 tokens with 64": lambda: index.add(some_keys(tokens=16)),
        "room for the anchors of 24 blocks, and 24 \\+ 1": lambda: index.add(some_keys(1)),
        "the importance \\[4\\] isn't that of": lambda: Anchors("DYNAMIC", 1, 4, 1, 32, 64).add(some_keys(1), torch.zeros(4)),
        "don't fit anchors of 4 rows": lambda: index.select(q[:2], SCALE, 3),
        "must be more than 0": lambda: index.select(q, -1.0, 3),
        "4 rows can't choose together in groups of 3": lambda: index.select(q, SCALE, 3, shared=3),
        "allowed blocks \\[4, 3\\]": lambda: index.select(q, SCALE, 3, allowed_RM=torch.ones(4, 3, dtype=torch.bool)),
        "-1 blocks can't be chosen": lambda: index.select(q, SCALE, -1),
        "sums \\[4, 3\\] aren't those of queries \\[4, 3, 64\\] and anchors KEY_INT4": lambda: index.select(
            q, SCALE, 3, rest_RH=torch.zeros(4, 3)
        ),
    }.items():
        with pytest.raises(KtoptError, match=message):
            call()


SIZES = [(20, 16, 1), (32, 48, 5), (128, 64, 3), (64, 128, 8), (32, 576, 18), (16, 1024, 2)]
"""Tokens, numbers of a key, query heads."""


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
@pytest.mark.parametrize(("tokens", "dim", "heads"), SIZES)
def test_scores_of_any_sizes_are_those_that_torch_computes(anchor_type: str, tokens: int, dim: int, heads: int) -> None:
    keys, q = some_keys(21, tokens, dim, rows=2), numbers(2, heads, dim, seed=2)
    index = made(anchor_type, keys, 3)
    expected = reference.scores(index.storage, 21, q, dim**-0.5, None, 0, None)
    assert (index.scores(q, dim**-0.5) - expected).abs().max() <= 5e-3 * expected.abs().max()  # queries in 8 bits
    if index.by_shares:
        rest = 4 * numbers(2, heads, seed=3)
        expected = reference.scores(index.storage, 21, q, dim**-0.5, None, 0, None, rest)
        assert (index.scores(q, dim**-0.5, rest_RH=rest) - expected).abs().max() <= 1e-2 * expected.abs().max()


@pytest.mark.parametrize(("tokens", "dim", "heads"), SIZES)
def test_indexes_of_any_sizes_are_those_that_torch_makes(tokens: int, dim: int, heads: int) -> None:
    keys = some_keys(7, tokens, dim, rows=2)
    storage, expected = made("KEY_INT4", keys).storage, reference.Storage.empty("KEY_INT4", 1, 2, 7, tokens, dim, "cpu")
    reference.add(expected, 0, keys, None)
    assert storage.anchors.equal(expected.anchors)
    for name in ("mean", "steps", "magnitude"):
        assert close(getattr(storage, name).float(), getattr(expected, name).float(), 1e-3)
    assert ((reference.int4_keys(storage, 7) - reference.int4_keys(expected, 7)).abs() > 0.1).float().mean() < 1e-3
    differ = reference.sign_keys(storage, 7) - reference.sign_keys(expected, 7)
    assert (differ.abs() > 0.1).float().mean() < 1e-3  # numbers that all but are the mean


@pytest.mark.parametrize(("tokens", "dim", "heads"), SIZES)
def test_the_shortlist_has_the_blocks_that_torch_lists(tokens: int, dim: int, heads: int) -> None:
    keys, q = some_keys(150, tokens, dim, rows=2), numbers(2, heads, dim, seed=2)
    index = made("KEY_INT4", keys)
    for rest in (None, 4 * numbers(2, heads, seed=3)):
        listed = index.scores(q, SCALE, 3, rest_RH=rest).isfinite()
        expected = reference.scores(index.storage, 150, q, SCALE, 3, 0, None, rest).isfinite()
        assert (listed & expected).sum() >= 0.95 * expected.sum()
        assert listed.sum() <= 2 * 80


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keys_may_lie_in_a_cache_of_any_float_type(anchor_type: str, dtype: torch.dtype) -> None:
    cache = torch.zeros(ROWS, BLOCKS * TOKENS + 50, DIM, dtype=dtype)
    keys = cache[:, 13 : 13 + BLOCKS * TOKENS].unflatten(1, (BLOCKS, TOKENS))
    keys.copy_(some_keys())
    q = numbers(ROWS, HEADS, DIM, seed=2)
    assert made(anchor_type, keys).scores(q, SCALE).equal(made(anchor_type, keys.float().contiguous()).scores(q, SCALE))


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
def test_the_number_of_threads_changes_nothing(anchor_type: str) -> None:
    keys, q = some_keys(150), numbers(ROWS, HEADS, DIM, seed=2)
    index = made(anchor_type, keys)
    alone = index.scores(q, SCALE, 5)
    torch.set_num_threads(3)
    try:
        assert index.scores(q, SCALE, 5).equal(alone)
        assert made(anchor_type, keys).select(q, SCALE, 5).equal(index.select(q, SCALE, 5))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
@pytest.mark.parametrize("number", [math.nan, math.inf, 3e38, 0.0])
def test_queries_without_sense_still_choose_blocks(anchor_type: str, number: float) -> None:
    index, q = made(anchor_type, some_keys(100)), torch.full((ROWS, HEADS, DIM), number)
    for rest in (None, torch.full((ROWS, HEADS), number)) if index.by_shares else (None,):
        picks = index.select(q, SCALE, 5, rest_RH=rest)
        assert picks.shape == (ROWS, 5)
        assert (picks[:, 1:] > picks[:, :-1]).all()
        assert ((picks >= 0) & (picks < 100)).all()


@pytest.mark.parametrize("kind", ["isotropic", "topics", "filler"])
def test_keys_in_4_bits_find_every_needle(kind: str, way: str) -> None:
    """139,264 unit keys (16,384 for torch, which takes long), 64 of which are near a query (cosine .96, inverse temperature 40), so
    that softmax looks at them alone."""
    tokens, needles, block = 16_384 if way == "torch" else 139_264, 64, 128
    unit = torch.nn.functional.normalize
    keys = unit(numbers(tokens, DIM, seed=4), dim=1)
    if kind == "topics":
        keys = unit(keys + unit(numbers(tokens // 512, DIM, seed=5), dim=1).repeat_interleave(512, 0), dim=1)
    if kind == "filler":
        sentence = unit(numbers(97, DIM, seed=5), dim=1).repeat(tokens // 97 + 1, 1)[:tokens]
        keys = unit(sentence + 0.1 * keys, dim=1)
    q, at = unit(numbers(needles, DIM, seed=6), dim=1), torch.randperm(tokens, generator=torch.Generator().manual_seed(7))[:needles]
    aside = numbers(needles, DIM, seed=8)
    aside = unit(aside - (aside * q).sum(1, keepdim=True) * q, dim=1)
    keys[at] = 0.96 * q + (1 - 0.96**2) ** 0.5 * aside
    assert (q @ keys.T * 40).softmax(1).gather(1, at[:, None]).min() > 0.9999
    index = made("KEY_INT4", keys.view(1, -1, block, DIM))
    for budget in (1, 8, 96):
        picks = torch.cat([index.select(one.view(1, 1, DIM), 40.0, budget) for one in q])
        assert (picks == at[:, None] // block).any(1).all()


def test_keys_that_the_kernels_do_not_take_are_said_once(caplog: pytest.LogCaptureFixture, way: str) -> None:
    anchors._said.clear()
    for _ in range(2):
        made("QUEST", some_keys(dim=24))
    wanted = "a test wants torch" if way == "torch" else "a multiple of 16 numbers up to 1024, not 24"
    assert [wanted in message for message in caplog.messages] == [True]
