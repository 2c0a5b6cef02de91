"""Attention of many queries on every instruction set, against torch's own in float64 with the error that rounding allows, and
against exact results where the inputs have one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from ktopt.kernels import cpu, reference

if not cpu.available()[0]:
    pytest.skip(cpu.available()[1], allow_module_level=True)

from ktopt.kernels.cpu.attention import prefill_attention

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BFLOAT16_ROUNDING = 2.0**-9


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    first: int = 0
    start: int = 0
    window: int = 0

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, and a cache whose end is not filled in: what stands there would spoil any result."""
        generator = torch.Generator().manual_seed(seed)
        filled = self.first + self.tokens
        q = torch.randn(self.tokens, self.heads, self.key_dim, generator=generator)
        keys = torch.full((self.kv_heads, filled + 3, self.key_dim), float("nan"), dtype=dtype)
        values = torch.full((self.kv_heads, filled + 3, self.value_dim), float("nan"), dtype=dtype)
        keys[:, :filled] = torch.randn(self.kv_heads, filled, self.key_dim, generator=generator)
        values[:, :filled] = torch.randn(self.kv_heads, filled, self.value_dim, generator=generator)
        return q, keys, values

    @property
    def sight(self) -> tuple[int, int]:
        return self.start, self.window

    def run(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, threads: int = 2) -> torch.Tensor:
        return prefill_attention(q, keys, values, first=self.first, start=self.start, window=self.window, threads=threads)


CASES = {
    "one token": Case(1),
    "two tokens": Case(2, heads=1, kv_heads=1),
    "three heads a key head": Case(131, heads=9, kv_heads=3),
    "every head its own keys": Case(200, heads=5, kv_heads=5, key_dim=72, value_dim=40),
    "many heads on one": Case(70, heads=7, kv_heads=1, key_dim=256, value_dim=256),
    "keys wider than values": Case(100, heads=4, kv_heads=4, key_dim=192, value_dim=128),
    "values wider than keys": Case(65, key_dim=16, value_dim=88),
    "smallest heads": Case(50, key_dim=8, value_dim=8),
    "after other tokens": Case(37, first=301),
    "one token after others": Case(1, heads=6, kv_heads=2, first=511),
    "a window": Case(300, heads=4, kv_heads=1, window=50),
    "a window of one": Case(40, window=1),
    "a window that never closes": Case(140, window=1 << 20),
    "a window after other tokens": Case(90, first=433, window=128),
    "padding on the left": Case(170, start=77),
    "padding and a window": Case(150, first=20, start=33, window=64),
    "padding ends within other tokens": Case(20, first=300, start=131),
    "only padding": Case(20, first=10, start=30),
}


@cache
def known(case: Case, dtype: torch.dtype, rounding: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64 and how far off a kernel may be."""
    q, keys, values = case.inputs(dtype)
    filled = case.first + case.tokens
    given = (q, keys[:, :filled], values[:, :filled], *case.sight, case.key_dim**-0.5)
    return reference.attention(*given), reference.attention_error(*given, rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_torchs_but_for_rounding(isa: str, case: Case, dtype: torch.dtype) -> None:
    expected, allowed = known(case, dtype, BFLOAT16_ROUNDING if isa == "avx512bf16" else 0.0)
    assert ((case.run(*case.inputs(dtype)) - expected).abs() <= allowed).all()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equal_scores_give_the_mean_of_exactly_the_values_seen(isa: str, case: Case) -> None:
    q, keys, values = case.inputs(torch.float16)
    filled = case.first + case.tokens
    keys[:, :filled] = 0
    values[:, :filled] = torch.arange(filled)[:, None] % 128  # exact in bfloat16 as well
    seen = reference.seen(case.tokens, filled, *case.sight).double()
    means = seen @ (torch.arange(filled) % 128).double() / seen.sum(1).clamp(min=1)
    torch.testing.assert_close(case.run(q, keys, values).double(), means[:, None, None].expand(*q.shape[:2], case.value_dim))


@pytest.mark.parametrize("scale", [1e2, 1e30])
@pytest.mark.parametrize("window", [0, 60])
def test_scores_far_apart_take_the_value_of_the_largest(isa: str, scale: float, window: int) -> None:
    tokens, order = 250, torch.randperm(250, generator=torch.Generator().manual_seed(0))
    keys = (order.float() - 125)[None, :, None].expand(2, tokens, 8).contiguous()  # whole numbers, exact in bfloat16
    values = torch.randn(2, tokens, 16).bfloat16().float()
    out = prefill_attention(torch.ones(tokens, 4, 8), keys, values, window=window, scale=scale)
    largest = order.where(reference.seen(tokens, tokens, 0, window), -1).argmax(1)
    for head in range(4):
        assert torch.equal(out[:, head], values[head // 2, largest])


def test_scores_of_any_size_keep_the_bound(isa: str) -> None:
    case = Case(140, heads=2, kv_heads=1)
    q, keys, values = case.inputs(torch.float32)
    q[:70] *= 8
    q[70:] *= 1e-30
    given = (q, keys[:, :140], values[:, :140], 0, 0, 0.125)
    error = (case.run(q, keys, values) - reference.attention(*given)).abs()
    assert (error <= reference.attention_error(*given, BFLOAT16_ROUNDING if isa == "avx512bf16" else 0.0)).all()


def test_a_key_that_is_no_number_spoils_the_queries_that_see_it_alone(isa: str) -> None:
    case = Case(100, window=30)
    q, keys, values = case.inputs(torch.float32)
    clean = case.run(q, keys, values)
    keys[0, 40, 5] = float("nan")
    spoilt = case.run(q, keys, values)
    assert spoilt[40:70, :2].isnan().all()
    assert torch.equal(spoilt[:, 2:], clean[:, 2:])
    assert torch.equal(spoilt[:40], clean[:40])
    assert torch.equal(spoilt[70:], clean[70:])


@pytest.mark.parametrize("case", [CASES["three heads a key head"], CASES["padding and a window"], Case(700, heads=2, kv_heads=1)])
def test_any_number_of_threads_gives_the_same_bits(isa: str, case: Case) -> None:
    inputs = case.inputs(torch.float16)
    alone = case.run(*inputs, threads=1)
    for threads in (0, 2, 3, 16):
        assert torch.equal(case.run(*inputs, threads=threads), alone)


def test_chunks_give_what_the_whole_prompt_gives(isa: str) -> None:
    case = Case(300, window=100, start=11)
    q, keys, values = case.inputs(torch.bfloat16)
    whole = case.run(q, keys, values)
    parts = [Case(100, first=first, window=100, start=11).run(q[first : first + 100], keys, values) for first in (0, 100, 200)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0.02 if isa == "avx512bf16" else 1e-5)


def test_queries_keys_and_results_may_be_slices_of_wider_tensors() -> None:
    case = Case(50)
    q, keys, values = case.inputs(torch.float16)
    wide, cache, out = torch.randn(50, 10, 64), torch.randn(5, 53, 64).half(), torch.zeros(50, 6, 64)
    wide[:, 3:7], cache[1:3], cache[3:5] = q, keys, values
    prefill_attention(wide[:, 3:7], cache[1:3], cache[3:5], out_THV=out[:, 1:5], threads=2)
    assert torch.equal(out[:, 1:5], case.run(q, keys, values))
    assert not out[:, 0].any()
    assert not out[:, 5].any()


def test_tensors_that_do_not_fit_are_refused() -> None:
    q, keys, values = Case(10).inputs(torch.float16)
    for wrong in (
        (q[:, :, :32], keys, values),
        (q, keys[:, :-1], values),
        (q, keys[:1], values),
        (q.double(), keys, values),
        (q, keys.double(), values.double()),
        (q, keys, values.bfloat16()),
        (q, keys.transpose(1, 2).contiguous().transpose(1, 2), values),
        (q[:, :3], keys, values),
        (q[:0], keys, values),
        (q[..., :60].contiguous(), keys[..., :60].contiguous(), values),
    ):
        with pytest.raises(ValueError, match=r"fit|must|multiple"):
            prefill_attention(*wrong)
    for places in (
        {"first": 4},
        {"first": -1},
        {"start": -1},
        {"window": -1},
        {"first": 1 << 60},
        {"out_THV": torch.empty(10, 4, 8)},
    ):
        with pytest.raises(ValueError, match=r"hold|less than 0|too large|fit"):
            prefill_attention(q, keys, values, **places)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap"):
        prefill_attention(q, keys[:1].expand(2, -1, -1), values)
