"""Blocks of keys and values are ggml's own bytes, and attention to them is torch's to the same numbers, wherever they lie."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from ktopt.cache.blocks.layout import KINDS, BlockLayout
from ktopt.diagnostics import KtoptError
from ktopt.kernels import block_reference, blocks, cpu
from ktopt.kernels.blocks import BlockSegments, CacheSegments

NONE = float("-inf")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


@pytest.fixture(params=[*cpu.ISAS, "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each instruction set of the CPU kernels that this CPU has, and torch, which computes where there are none."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "available", lambda: (False, "not built"))
        yield "torch"
        return
    if not cpu.available()[0] or request.param not in cpu.isas():
        pytest.skip(f"there is no {request.param} here")
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(None)


def ggufs_bytes(numbers: torch.Tensor, kind: str) -> np.ndarray:
    return quants.quantize(numbers.float().numpy(), GGMLQuantizationType[kind])


def awkward(rows: int, dim: int) -> torch.Tensor:
    """Numbers of many sizes; halves between steps, zeros, and groups of one number only."""
    numbers = torch.randn(rows, dim) * torch.exp(torch.randn(rows, 1) * 2)
    numbers[0] = (torch.arange(dim) % 32 - 16) / 2
    numbers[0, 0] = 127 / 2
    numbers[1] = 0
    numbers[2] = -3.5
    numbers[3, ::2] *= -1e-6
    return numbers


class Blocks:
    """K blocks of R rows, scattered in memory in any order; `segments` attends to all of them."""

    def __init__(self, layout: BlockLayout, rows: int, count: int, spread: float = 1.0) -> None:
        self.layout, self.rows, self.count = layout, rows, count
        self.arena = torch.empty(2 * rows * count + 1, layout.nbytes, dtype=torch.uint8)
        self.addresses = torch.empty(rows, count, dtype=torch.int64)
        places = random.Random(1).sample(range(len(self.arena)), rows * count)
        keys, values = [], []
        for block in range(count):
            k = torch.randn(rows, layout.tokens, layout.key_dim) * spread
            v = None if layout.shared else torch.randn(rows, layout.tokens, layout.value_dim)
            packed = blocks.pack(k, v, layout)
            for row in range(rows):
                place = places.pop()
                self.arena[place] = packed[row]
                self.addresses[row, block] = self.arena[place].data_ptr()
            stored = block_reference.dequantize(block_reference.quantize(k, layout.kind), layout.kind)
            keys.append(stored)
            values.append(
                stored[..., : layout.value_dim]
                if v is None
                else block_reference.dequantize(block_reference.quantize(v, layout.kind), layout.kind)
            )
        self.keys, self.values = torch.cat(keys, 1), torch.cat(values, 1)

    def segments(self, hidden: torch.Tensor | None = None) -> BlockSegments:
        return BlockSegments(self.layout, self.addresses, hidden)


def torchs(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own attention in float64 (R, H, V), and the logarithm of each softmax's sum."""
    q, keys, values = q.double(), keys.double(), values.double()
    scores = q @ keys.transpose(1, 2) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], NONE)
    mask = None if seen is None else seen[:, None]
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask, scale=scale), scores.logsumexp(-1)


def close(made: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], off: float = 1e-5) -> None:
    """Within `off` of the largest number, NaN nowhere."""
    assert not made[0].isnan().any()
    assert (made[0].double() - wanted[0]).abs().max() <= off * wanted[0].abs().max()
    torch.testing.assert_close(made[1].double(), wanted[1].double(), rtol=off, atol=10 * off)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_packed_rows_are_ggufs_bytes(way: str, kind: str, dtype: torch.dtype) -> None:
    layout = BlockLayout(16, 96, 64, kind)
    keys, values = (awkward(48, dim).reshape(3, 16, dim).to(dtype) for dim in (96, 64))
    made = blocks.pack(keys, values, layout)
    for row in range(3):
        wanted = np.concatenate([ggufs_bytes(x[row], kind).view(np.uint8).reshape(-1) for x in (keys, values)])
        np.testing.assert_array_equal(made[row, : len(wanted)].numpy(), wanted)
        assert not made[row, len(wanted) :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_blocks_are_ggufs_numbers(way: str, kind: str) -> None:
    layout = BlockLayout(8, 64, 32, kind)
    keys, values = torch.randn(6, 8, 64), torch.randn(6, 8, 32)
    stored = blocks.pack(keys, values, layout)
    order = torch.tensor([[3, 0], [5, 1]])
    addresses = stored.data_ptr() + order * layout.nbytes
    made = blocks.unpack(addresses, layout)
    for numbers, given in zip(made, (keys, values), strict=True):
        wanted = quants.dequantize(ggufs_bytes(given, kind), GGMLQuantizationType[kind])
        assert torch.equal(numbers.unflatten(1, (2, 8)), torch.from_numpy(wanted).reshape(given.shape)[order])
    for dtype in (torch.float16, torch.bfloat16):
        narrow = blocks.unpack(addresses, layout, dtype)
        assert torch.equal(narrow[0], made[0].to(dtype))
        assert torch.equal(narrow[1], made[1].to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(1, 64, 64), (3, 64, 64), (8, 128, 96), (21, 192, 128)])
def test_attention_to_scattered_blocks_is_torchs(way: str, kind: str, heads: int, key_dim: int, value_dim: int) -> None:
    made = Blocks(BlockLayout(32, key_dim, value_dim, kind), 2, 5)
    q = torch.randn(2, heads, key_dim)
    close(blocks.attend(q, [made.segments()], value_dim=value_dim, scale=0.2), torchs(q, made.keys, made.values, 0.2))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("heads", [1, 18])
def test_attention_to_latents_takes_values_from_keys(way: str, kind: str, heads: int) -> None:
    made = Blocks(BlockLayout(64, 576, 512, kind, shared=True), 2, 3)
    window = torch.randn(2, 80, 576, dtype=torch.bfloat16)
    q = torch.randn(2, heads, 576)
    keys = torch.cat([made.keys, window[:, 3:70].float()], 1)
    both = [made.segments(), CacheSegments(window, None, 3, 70)]
    close(blocks.attend(q, both, value_dim=512, scale=0.05), torchs(q, keys, keys[..., :512], 0.05))


def test_kinds_mix_and_hidden_tokens_are_not_seen(way: str) -> None:
    old, sink = Blocks(BlockLayout(32, 64, 64, "Q8_0"), 4, 6), Blocks(BlockLayout(64, 64, 64, "F16"), 4, 1)
    keys, values = torch.randn(4, 50, 64, dtype=torch.bfloat16), torch.randn(4, 50, 64, dtype=torch.bfloat16)
    hidden = torch.tensor([[0, 0, 0, 0, 0, 0], [32, 7, 0, 0, 0, 0], [40, 32, 32, 31, 0, 0], [0, 1, 2, 3, 4, 32]])
    old.addresses[1, 0] = 0  # none of it is seen
    parts = [old.segments(hidden), sink.segments(), CacheSegments(keys, values, 9, 48)]
    seen = torch.ones(4, 6 * 32 + 64 + 39, dtype=torch.bool)
    seen[:, : 6 * 32] = (torch.arange(32) >= hidden[..., None]).flatten(1)
    q = torch.randn(4, 3, 64)
    wanted = torchs(
        q,
        torch.cat([old.keys, sink.keys, keys[:, 9:48].float()], 1),
        torch.cat([old.values, sink.values, values[:, 9:48].float()], 1),
        0.3,
        seen,
    )
    close(blocks.attend(q, parts, value_dim=64, scale=0.3), wanted)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_long_rows_are_cut_into_parts_anywhere_and_merged(threads: int) -> None:
    made, q = Blocks(BlockLayout(128, 64, 32, "Q8_0"), 3, 9), torch.randn(3, 2, 64)
    keys, values = torch.randn(3, 9001, 64, dtype=torch.float16), torch.randn(3, 9001, 32, dtype=torch.float16)
    parts = [CacheSegments(keys, values, 7, 8995), made.segments(), CacheSegments(keys, values, 0, 5)]
    wanted = torchs(
        q,
        torch.cat([keys[:, 7:8995].float(), made.keys, keys[:, :5].float()], 1),
        torch.cat([values[:, 7:8995].float(), made.values, values[:, :5].float()], 1),
        0.2,
    )
    close(blocks.attend(q, parts, value_dim=32, scale=0.2, threads=threads), wanted)


def test_rows_that_see_nothing_give_zeros_and_minus_infinity(way: str) -> None:
    made = Blocks(BlockLayout(16, 32, 32, "F16"), 2, 2)
    out, log_sum = blocks.attend(torch.randn(2, 3, 32), [made.segments(torch.tensor([[16, 20], [0, 15]]))], value_dim=32, scale=1.0)
    assert not out[0].any()
    assert (log_sum[0] == NONE).all()
    assert out[1].any()
    assert log_sum[1].isfinite().all()


def test_scores_of_any_size_neither_overflow_nor_vanish(way: str) -> None:
    made = Blocks(BlockLayout(32, 64, 64, "F32"), 2, 4, spread=300.0)
    q = torch.randn(2, 4, 64) * 100
    close(blocks.attend(q, [made.segments()], value_dim=64, scale=1.0), torchs(q, made.keys, made.values, 1.0), 1e-2)


def tiles(tokens: int, heads: int, kv_heads: int, keys: int, dim: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    yield torch.randn(tokens, heads, dim)
    yield torch.randn(kv_heads, keys, dim).to(dtype)
    yield torch.randn(kv_heads, keys, dim).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_context_in_tiles_and_the_chunks_own_part_merge_to_one_causal_attention(way: str, dtype: torch.dtype) -> None:
    q, keys, values = tiles(40, 6, 2, 300, 64, dtype)
    past, start = 260, 17
    parts = [
        blocks.attend_tile(q, keys, values, causal=False, start=start, end=130),
        blocks.attend_tile(q, keys[:, 130:past], values[:, 130:past], causal=False),
        blocks.attend_tile(q, keys[:, past:], values[:, past:], scale=64**-0.5),
    ]
    out, log_sum = blocks.merge(parts)
    wanted = blocks.attend_tile_reference(q.double(), keys, values, first=past, start=start)
    close((out, log_sum), wanted, 1e-2 if dtype is not torch.float32 else 1e-5)
    shown = torch.ones(40, 300, dtype=torch.bool).tril(past)
    shown[:, :start] = False
    torchs_own = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1)[None], keys.double()[None], values.double()[None], shown, enable_gqa=True
    )
    torch.testing.assert_close(wanted[0], torchs_own[0].transpose(0, 1))


def test_tiles_with_a_window_or_without_keys_tell_their_sums(way: str) -> None:
    q, keys, values = tiles(30, 4, 4, 50, 32, torch.float32)
    made = blocks.attend_tile(q, keys, values, first=20, start=25, window=8)
    wanted = blocks.attend_tile_reference(q.double(), keys, values, first=20, start=25, window=8)
    assert (made[1][:5] == NONE).all()
    assert not made[0][:5].any()
    close(made, wanted)
    out, log_sum = blocks.attend_tile(q, keys, values, causal=False, start=50)
    assert not out.any()
    assert (log_sum == NONE).all()


@pytest.mark.parametrize("given", [{"first": 20, "start": 25, "window": 8}, {"causal": False, "start": 3, "end": 40}])
def test_torch_takes_some_queries_of_a_tile_at_a_time(given: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values = tiles(30, 4, 2, 50, 32, torch.float32)
    wanted, pieces = blocks.attend_tile_reference(q, keys, values, **given), []
    one = blocks.attend_tile_reference
    monkeypatch.setattr(cpu, "available", lambda: (False, "not built"))
    monkeypatch.setattr(blocks, "SCORES", 7 * 4 * 50)
    monkeypatch.setattr(
        blocks, "attend_tile_reference", lambda q, *args, **kwargs: pieces.append(len(q)) or one(q, *args, **kwargs)
    )
    close(blocks.attend_tile(q, keys, values, **given), wanted)
    assert pieces == [7, 7, 7, 7, 2]


def test_parts_that_see_nothing_change_nothing() -> None:
    part = torch.randn(5, 3, 8), torch.randn(5, 3)
    nothing = torch.zeros(5, 3, 8), torch.full((5, 3), NONE)
    out, log_sum = blocks.merge([nothing, part, nothing])
    torch.testing.assert_close(out, part[0])
    torch.testing.assert_close(log_sum, part[1])
    assert not blocks.merge([nothing, nothing])[0].isnan().any()


def test_what_does_not_fit_is_refused() -> None:
    layout = BlockLayout(16, 64, 64, "F16")
    with pytest.raises(ValueError, match="don't fit blocks"):
        blocks.pack(torch.zeros(2, 15, 64), torch.zeros(2, 15, 64), layout)
    with pytest.raises(ValueError, match="don't fit blocks"):
        blocks.pack(torch.zeros(2, 16, 64), None, layout)
    with pytest.raises(ValueError, match="ends where its queries do"):
        blocks.attend_tile(torch.zeros(2, 3, 64), torch.zeros(3, 9, 64), torch.zeros(3, 9, 64), end=5)
    with pytest.raises(ValueError, match="doesn't hold"):
        blocks.attend_tile(torch.zeros(2, 3, 64), torch.zeros(3, 9, 64), torch.zeros(3, 9, 64), causal=False, end=10)
    with pytest.raises(ValueError, match="no address"):
        blocks.unpack(torch.zeros(2, 3, dtype=torch.int64), layout)
    q = torch.randn(2, 3, 64)
    with pytest.raises(ValueError, match="no address"):
        blocks.attend(q, [BlockSegments(layout, torch.zeros(2, 3, dtype=torch.int64))], value_dim=64, scale=1.0)


@pytest.mark.parametrize(
    ("kind", "number", "fits"),
    [
        ("F16", 65504.0, True),
        ("F16", 7e4, False),
        ("F16", float("inf"), True),
        ("BF16", 1e30, True),
        ("Q8_0", 65504.0 * 127, True),
        ("Q8_0", 65504.0 * 128, False),
        ("Q4_0", -65504.0 * 8, True),
        ("Q4_0", 65504.0 * 9, False),
        ("Q8_0", float("nan"), False),
        ("Q4_0", float("-inf"), False),
    ],
)
def test_numbers_that_a_kind_cannot_hold_are_refused(way: str, kind: str, number: float, fits: bool) -> None:
    values = torch.ones(1, 4, 32)
    values[0, 2, 17] = number
    layout = BlockLayout(4, 32, 32, kind)
    if fits:
        blocks.pack(torch.ones(1, 4, 32), values, layout)
        return
    with pytest.raises(KtoptError, match=f"{kind} can't hold: keep them as BF16"):
        blocks.pack(torch.ones(1, 4, 32), values, layout)


def test_tensors_are_packed_from_where_they_lie() -> None:
    layout = BlockLayout(16, 64, 32, "Q8_0")
    keys, values = torch.randn(2, 3, 40, 64), torch.randn(2, 40, 3, 32).transpose(1, 2)
    out = torch.zeros(6, 2, layout.nbytes, dtype=torch.uint8)
    parts = keys.flatten(0, 1)[:, 8:24], values.flatten(0, 1)[:, 8:24]
    made = blocks.pack(*parts, layout, out=out[:, 1])
    assert torch.equal(made, block_reference.pack(*parts, layout))
    assert torch.equal(out[:, 1], made)
    assert not out[:, 0].any()


def test_torch_computes_where_there_is_no_kernel_and_the_log_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    blocks._say.cache_clear()
    made = Blocks(BlockLayout(8, 24, 8, "F32"), 2, 3)
    q = torch.randn(2, 3, 24)
    for _ in range(2):
        close(blocks.attend(q, [made.segments()], value_dim=8, scale=0.2), torchs(q, made.keys, made.values, 0.2))
    assert [record.getMessage() for record in caplog.records] == [
        "blocks are computed by torch: kernels take dimensions that are multiples of 16, and of 32 for Q8_0 and Q4_0"
    ]
