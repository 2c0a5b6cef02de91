"""Attention to blocks by FlashInfer: what it is given and how its results are merged, on a stand-in that computes in torch; and on
the real one where there is a GPU that it runs on.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
from flashinfer_stand_in import BatchDecodeWithPagedKVCacheWrapper
from torch.nn.functional import scaled_dot_product_attention

from ktopt.kernels.cuda import blocks as cuda_blocks
from ktopt.kernels.cuda import flashinfer
from ktopt.kernels.cuda.blocks import BlockAttention
from ktopt.kernels.cuda.slots import SlotSegments
from ktopt.kernels.segments import CacheSegments

REAL = torch.cuda.is_available() and not cuda_blocks.refuses(torch.device("cuda:0"), 64, 64, torch.float16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not REAL, reason="no GPU that FlashInfer runs on"))]
SCALE = 0.11
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[BatchDecodeWithPagedKVCacheWrapper]:
    """FlashInfer as if it ran on the CPU, where a test runs there; the wrappers that are made."""
    made: list[BatchDecodeWithPagedKVCacheWrapper] = []

    def make(*args: Any, **kwargs: Any) -> BatchDecodeWithPagedKVCacheWrapper:
        made.append(BatchDecodeWithPagedKVCacheWrapper(*args, **kwargs))
        return made[-1]

    params = getattr(getattr(request.node, "callspec", None), "params", {})
    if params.get("device", "cpu") == "cpu":
        monkeypatch.setattr(cuda_blocks, "wrapper_class", lambda: make)
        monkeypatch.setattr(cuda_blocks, "refuses", lambda *args: "")
    return made


def pool_of(slots: int, tokens: int, dim: int, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    return torch.randn(slots, 2 * tokens * dim).to(device, dtype)


def scattered(pool: torch.Tensor, rows: int, count: int) -> torch.Tensor:
    """Slots for each row, none of them twice."""
    return torch.randperm(len(pool))[: rows * count].view(rows, count).int().to(pool.device)


def window_of(rows: int, capacity: int, begin: int, end: int, dim: int, like: torch.Tensor, hidden: Any = None) -> CacheSegments:
    keys, values = (torch.randn(rows, capacity, dim).to(like) for _ in range(2))
    for cache in (keys, values):  # what isn't to be read
        cache[:, :begin], cache[:, end:] = math.nan, math.nan
    return CacheSegments(keys, values, begin, end, None if hidden is None else torch.tensor(hidden)[:, None])


def expected(query: torch.Tensor, segments: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """By torch's own attention in float64, row by row, from the numbers that the segments stand for."""
    outs, sums = [], []
    for row in range(len(query)):
        keys, values = [], []
        for part in segments:
            if isinstance(part, SlotSegments):
                for k, slot in enumerate(part.slots_RK[row].tolist()):
                    first = 0 if part.hidden_RK is None else int(part.hidden_RK[row, k])
                    block = part.pool_SN[slot].double().cpu().view(2, part.block_tokens, part.key_dim)
                    keys.append(block[0, first:])
                    values.append(block[1, first:])
            else:
                first = part.begin + (0 if part.hidden_RK is None else int(part.hidden_RK[row, 0]))
                keys.append(part.keys_RCD[row, first : part.end].double().cpu())
                values.append(part.values_RCV[row, first : part.end].double().cpu())
        k, v, q = torch.cat(keys), torch.cat(values), query[row].double().cpu()
        sums.append((q @ k.T * SCALE).logsumexp(-1))
        outs.append(scaled_dot_product_attention(q[None], k[None], v[None], scale=SCALE)[0] if len(k) else torch.zeros_like(q))
    return torch.stack(outs), torch.stack(sums)


def check(attention: BlockAttention, query: torch.Tensor, segments: list[Any]) -> None:
    dtype = segments[0].pool_SN.dtype if isinstance(segments[0], SlotSegments) else segments[0].keys_RCD.dtype
    out, log_sum = attention.attend(query, segments, value_dim=query.shape[2], scale=SCALE)
    wanted = expected(query.to(dtype), segments)
    assert out.dtype == log_sum.dtype == torch.float32
    torch.testing.assert_close(out.double().cpu(), wanted[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(log_sum.double().cpu(), wanted[1], rtol=1e-3, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tokens", "count", "heads", "dim", "dtype"),
    [
        (32, 5, 3, 64, torch.float16),
        (128, 1, 1, 128, torch.bfloat16),
        (256, 3, 7, 64, torch.float16),
        (64, 2, 8, 256, torch.bfloat16),
        (48, 2, 2, 64, torch.float16),
    ],
)
def test_each_row_attends_to_its_own_blocks_wherever_they_lie(
    device: str, tokens: int, count: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    pool = pool_of(20, tokens, dim, dtype, device)
    query = torch.randn(3, heads, dim, device=device)
    check(BlockAttention(torch.device(device)), query, [SlotSegments(pool, scattered(pool, 3, count), tokens, dim)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("capacity", "begin", "end"), [(256, 0, 256), (256, 128, 129), (250, 31, 97), (97, 96, 97), (320, 64, 300)]
)
@pytest.mark.parametrize("rows", [1, 4])
def test_the_window_is_read_in_place_whatever_its_first_token_and_its_last(
    device: str, capacity: int, begin: int, end: int, rows: int
) -> None:
    pool = pool_of(9, 32, 64, device=device)
    window = window_of(rows, capacity, begin, end, 64, pool)
    sink = window_of(rows, 64, 0, 64, 64, pool)
    picked = SlotSegments(pool, scattered(pool, rows, 2), 32, 64)
    query = torch.randn(rows, 3, 64, device=device)
    attention = BlockAttention(torch.device(device))
    check(attention, query, [window])
    check(attention, query, [sink, picked, window])


@pytest.mark.parametrize("device", DEVICES)
def test_padding_at_the_begin_is_not_seen(device: str) -> None:
    """The first row sees all, the second begins within a block, the third within the window, and the fourth nowhere."""
    pool = pool_of(9, 32, 64, device=device)
    slots = scattered(pool, 4, 2)
    slots[2:] = -1
    hidden = torch.tensor([[0, 0], [20, 0], [32, 32], [32, 32]])
    picked = SlotSegments(pool, slots, 32, 64, hidden)
    window = window_of(4, 64, 8, 50, 64, pool, [0, 0, 3, 42])
    query = torch.randn(4, 3, 64, device=device)
    check(BlockAttention(torch.device(device)), query, [picked, window])
    check(BlockAttention(torch.device(device)), query, [picked])
    check(BlockAttention(torch.device(device)), query, [window])


@pytest.mark.parametrize("device", DEVICES)
def test_empty_lists_are_zeros_with_a_sum_of_nothing(device: str) -> None:
    pool = pool_of(4, 32, 64, device=device)
    nothing = SlotSegments(pool, torch.zeros(2, 0, dtype=torch.int32, device=device), 32, 64)
    hidden = SlotSegments(pool, torch.full((2, 1), -1, device=device), 32, 64, torch.tensor([[32], [32]]))
    query = torch.randn(2, 3, 64, device=device)
    for segments in ([], [nothing], [nothing, hidden, window_of(2, 32, 7, 7, 64, pool)]):
        out, log_sum = BlockAttention(torch.device(device)).attend(query, segments, value_dim=64, scale=SCALE)
        assert out.shape == (2, 3, 64)
        assert not out.any()
        assert (log_sum == -math.inf).all()
    check(BlockAttention(torch.device(device)), query, [nothing, window_of(2, 32, 7, 9, 64, pool)])


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_planned_once_for_all_layers_whichever_blocks_they_choose(device: str) -> None:
    attention, query = BlockAttention(torch.device(device)), torch.randn(3, 3, 64, device=device)
    layers = [pool_of(12, 32, 64, device=device) for _ in range(3)]
    for step in range(4):
        for pool in layers:
            picked = SlotSegments(pool, scattered(pool, 3, 4), 32, 64)
            check(attention, query, [picked, window_of(3, 64, 32, 40 + step, 64, pool)])
        assert attention.plans == 1 + (step + 1)  # the blocks' once, the window's as it grows
    more = SlotSegments(layers[0], scattered(layers[0], 3, 3), 32, 64)
    check(attention, query, [more])
    assert attention.plans == 6


def test_buffers_stay_where_they_are_for_cuda_graphs_and_grow_with_the_longest_list(
    stand_in: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_blocks, "LEAST_ROOM", 4)
    attention, query, pool = BlockAttention(torch.device("cpu")), torch.randn(2, 3, 64), pool_of(20, 32, 64)
    for count in (1, 2):
        check(attention, query, [SlotSegments(pool, scattered(pool, 2, count), 32, 64)])
    assert len(stand_in) == 1
    check(attention, query, [SlotSegments(pool, scattered(pool, 2, 9), 32, 64)])
    assert len(stand_in) == 2
    assert len(stand_in[1].buffers[1]) == 32


def test_one_workspace_serves_all_parts_and_batches(stand_in: list[Any]) -> None:
    attention, pool = BlockAttention(torch.device("cpu")), pool_of(20, 32, 64)
    for rows in (1, 2):
        parts = [SlotSegments(pool, scattered(pool, rows, 2), 32, 64), window_of(rows, 32, 0, 20, 64, pool)]
        check(attention, torch.randn(rows, 3, 64), parts)
    assert len(stand_in) == 4
    assert all(wrapper.workspace is stand_in[0].workspace for wrapper in stand_in)


def test_buffers_made_in_inference_mode_serve_outside_of_it() -> None:
    attention, query, pool = BlockAttention(torch.device("cpu")), torch.randn(2, 3, 64), pool_of(9, 32, 64)
    with torch.inference_mode():
        check(attention, query, [SlotSegments(pool, scattered(pool, 2, 2), 32, 64)])
    check(attention, query, [SlotSegments(pool, scattered(pool, 2, 2), 32, 64)])


class TestWhatFlashInferRefuses:
    @pytest.fixture
    def refuses(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The real one, as if there were FlashInfer and a GPU of compute capability 9.0."""
        monkeypatch.undo()
        monkeypatch.setattr(flashinfer, "find_spec", lambda name: object())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        cuda_blocks.refuses.cache_clear()
        yield cuda_blocks.refuses
        cuda_blocks.refuses.cache_clear()

    def test_nothing_where_all_fits(self, refuses: Any) -> None:
        assert refuses(torch.device("cuda:0"), 128, 128, torch.bfloat16) == ""

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (("cpu", 64, 64, torch.float16), "not on cpu"),
            (("cuda:0", 80, 80, torch.float16), r"\(64, 128, 256\), not 80 and 80"),
            (("cuda:0", 128, 64, torch.float16), "not 128 and 64"),
            (("cuda:0", 64, 64, torch.float32), "not torch.float32"),
        ],
    )
    def test_sizes_dtypes_and_devices_by_name(self, refuses: Any, arguments: Any, reason: str) -> None:
        device, *others = arguments
        assert re.search(reason, refuses(torch.device(device), *others))

    def test_old_gpus(self, refuses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert "older than compute capability 8.0" in refuses(torch.device("cuda:1"), 64, 64, torch.float16)

    def test_where_it_is_not_installed(self, refuses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flashinfer, "find_spec", lambda name: None)
        assert 'pip install "ktopt[cuda]"' in refuses(torch.device("cuda:1"), 64, 64, torch.float16)

    def test_torch_computes_it_then_and_the_log_says_so_once(self, refuses: Any, caplog: pytest.LogCaptureFixture) -> None:
        cuda_blocks._say.cache_clear()
        pool, attention, query = pool_of(9, 32, 64), BlockAttention(torch.device("cpu")), torch.randn(2, 3, 64)
        picked = SlotSegments(pool, scattered(pool, 2, 2), 32, 64, torch.tensor([[0, 0], [5, 0]]))
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                check(attention, query, [picked, window_of(2, 64, 3, 50, 64, pool)])
        assert [record.getMessage() for record in caplog.records] == [
            "attention to blocks is computed by torch on cpu, not by FlashInfer: it runs on NVIDIA GPUs, not on cpu"
        ]

    def test_latents_and_windows_of_unlike_memories(self) -> None:
        keys, values = torch.zeros(2, 32, 64), torch.zeros(2, 64, 32).transpose(1, 2).expand(2, 32, 64)
        device = torch.device("cpu")
        assert "latents" in cuda_blocks.refuses_part(device, CacheSegments(keys, None, 0, 1), 64)
        assert "in different ways" in cuda_blocks.refuses_part(device, CacheSegments(keys, values, 0, 1), 64)
