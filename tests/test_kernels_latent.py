"""Latent attention on the CPU: every instruction set and type of cache against torch in float64, and kv_b_proj as files hold it.

Legend as in kernels/cpu/latent.py: N heads, P qk_nope, R qk_rope, L kv_lora_rank, V v_head_dim, W = L + R.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantized import random_blocks

from ktopt.kernels import cpu, reference
from ktopt.kernels.cpu import latent

if not cpu.available()[0]:
    pytest.skip(cpu.available()[1], allow_module_level=True)

N, P, R, L, V = 5, 32, 32, 64, 48
SCALE = 0.11
PAGES, PAGE = 24, 16
ROWS = ((0, 0, 180), (0, 3, 181), (0, 0, 1), (1, 64, 64), (1, 10, 77), (2, 0, 190), (2, 189, 190))
"""Query rows: a row of the page table, and the tokens [start, end)."""
SMALL = {"Q8_0": np.array([0.0008, 0.002]), "Q4_0": np.array([0.01, -0.03])}
"""Scales that give weights of about 0.1."""
TOLERANCE = {"F32": 1e-5, "F16": 1e-5, "BF16": 1e-2, "Q8_0": 1e-2}


def pages(kind: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache as stored, and its numbers (pages, tokens, W) in float32."""
    scales = np.array([0.004, 0.01, -0.02])
    raw = random_blocks(kind, PAGES * PAGE, L + R, np.random.default_rng(seed), scales)
    return torch.from_numpy(raw).view(PAGES, PAGE, -1), reference.weight(kind, raw, L + R).view(PAGES, PAGE, L + R)


def table() -> torch.Tensor:
    return (
        torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[: 3 * (PAGES // 2)]
        .int()
        .repeat(2)[:36]
        .view(3, 12)
        .contiguous()
    )


def expected(
    query: torch.Tensor, numbers: torch.Tensor, rows: tuple[tuple[int, int, int], ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What latent_attention must give, in float64."""
    outs, sums = [], []
    for q_NW, (sequence, start, end) in zip(query.double(), rows, strict=True):
        context_TW = numbers[table()[sequence].long()].reshape(-1, L + R)[start:end].double()
        scores = q_NW @ context_TW.T * SCALE
        outs.append(scores.softmax(-1) @ context_TW[:, :L])
        sums.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(sums)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", TOLERANCE)
def test_attention_over_scattered_pages_is_that_of_float64(isa: str, kind: str, threads: int) -> None:
    stored, numbers = pages(kind)
    query = torch.randn(len(ROWS), N, L + R)
    found = latent.latent_attention(query, stored, kind, table(), torch.tensor(ROWS), L, SCALE, threads)
    wanted = expected(query, numbers, ROWS)
    size = numbers.abs().max().item()
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=0, atol=TOLERANCE[kind] * size)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=0, atol=TOLERANCE[kind] * size)


def test_heads_in_any_number_have_the_results_that_they_have_alone(isa: str) -> None:
    stored, _ = pages("F32")
    query = torch.randn(2, 37, L + R)
    rows = torch.tensor(ROWS[:2])
    together = latent.latent_attention(query, stored, "F32", table(), rows, L, SCALE, 2)[0]
    for head in (0, 15, 16, 36):
        alone = latent.latent_attention(query[:, head : head + 1].contiguous(), stored, "F32", table(), rows, L, SCALE, 1)[0]
        torch.testing.assert_close(together[:, head : head + 1], alone, rtol=1e-5, atol=1e-6)


def test_a_row_without_tokens_gives_zero_and_no_sum(isa: str) -> None:
    stored, _ = pages("BF16")
    found = latent.latent_attention(torch.randn(1, N, L + R), stored, "BF16", table(), torch.tensor([[0, 7, 7]]), L, SCALE, 2)
    assert not found[0].any()
    assert (found[1] == float("-inf")).all()


def test_scores_of_any_size_give_a_finite_mean(isa: str) -> None:
    stored, numbers = pages("F32")
    query = torch.randn(1, N, L + R) * 1e4  # one token takes all
    found = latent.latent_attention(query, stored, "F32", table(), torch.tensor([[0, 0, 180]]), L, SCALE, 2)[0]
    torch.testing.assert_close(found.double(), expected(query, numbers, ((0, 0, 180),))[0], rtol=1e-3, atol=1e-3)


def test_a_query_that_is_no_number_gives_none(isa: str) -> None:
    stored, _ = pages("F32")
    query = torch.randn(1, N, L + R)
    query[0, 2, 9] = float("nan")
    found = latent.latent_attention(query, stored, "F32", table(), torch.tensor([[0, 0, 180]]), L, SCALE, 2)[0]
    assert found[0, 2].isnan().all()
    assert found[0, 1].isfinite().all()


def fused(kind: str) -> tuple[cpu.Blocks, torch.Tensor]:
    """kv_b_proj as one matrix (N * (P + V), L): its blocks, and its numbers as (N, P + V, L)."""
    raw = random_blocks(kind, N * (P + V), L, np.random.default_rng(3), SMALL.get(kind))
    return cpu.blocks(kind, N * (P + V), L, raw), reference.weight(kind, raw, L).view(N, P + V, L)


def split(kind: str) -> tuple[cpu.Blocks, cpu.Blocks, torch.Tensor]:
    """The keys' matrices (N, L, P), the values' (N, V, L), and both as a fused one's numbers."""
    rng = np.random.default_rng(4)
    keys, values = (random_blocks(kind, N * rows, columns, rng, SMALL.get(kind)) for rows, columns in ((L, P), (V, L)))
    numbers = torch.cat([reference.weight(kind, keys, P).view(N, L, P).mT, reference.weight(kind, values, L).view(N, V, L)], 1)
    return cpu.blocks(kind, N * L, P, keys), cpu.blocks(kind, N * V, L, values), numbers


def expanded(query: torch.Tensor, numbers: torch.Tensor, kv_b: torch.Tensor) -> torch.Tensor:
    """Attention as the model defines it: kv_b_proj applied to the context, no absorption. (rows, N, V), float64."""
    outs = []
    for q_NH, (sequence, start, end) in zip(query.double(), ROWS, strict=True):
        context = numbers[table()[sequence].long()].reshape(-1, L + R)[start:end].double()
        kv_NTH = torch.einsum("tl,nhl->nth", context[:, :L], kv_b.double())
        key = torch.cat([kv_NTH[..., :P], context[:, L:].expand(N, -1, -1)], -1)
        weights = (torch.einsum("nh,nth->nt", q_NH, key) * SCALE).softmax(-1)
        outs.append(torch.einsum("nt,ntv->nv", weights, kv_NTH[..., P:]))
    return torch.stack(outs)


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 1e-5), ("BF16", 1e-5), ("Q8_0", 2e-2), ("Q4_0", 2e-2)])
@pytest.mark.parametrize("form", ["fused", "split"])
def test_absorbed_attention_is_expanded_attention(isa: str, form: str, kind: str, tolerance: float) -> None:
    stored, numbers = pages("F32")
    query = torch.randn(len(ROWS), N, P + R)
    if form == "fused":
        both, kv_b = fused(kind)
        keys, values = latent.HeadBlocks(both, P, P + V, transposed=True), latent.HeadBlocks(both, V, P + V, P)
    else:
        k_b, v_b, kv_b = split(kind)
        keys, values = latent.HeadBlocks(k_b, L, L), latent.HeadBlocks(v_b, V, V)
    found = latent.absorbed_attention(query, stored, "F32", table(), torch.tensor(ROWS), keys, values, SCALE, 2).double()
    wanted = expanded(query, numbers, kv_b)
    wanted[3], row = 0, wanted[3]  # a row without tokens
    assert not row.isnan().any()
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * wanted.abs().max().item())


def test_sizes_that_do_not_fit_are_refused_before_any_read() -> None:
    stored, _ = pages("F32")
    query = torch.randn(1, N, L + R)
    good = torch.tensor([[0, 0, 180]])

    def call(
        rows: torch.Tensor = good, query: torch.Tensor = query, cache: torch.Tensor = stored, kind: str = "F32", latent_: int = L
    ) -> None:
        latent.latent_attention(query, cache, kind, table(), rows, latent_, SCALE, 1)

    call()
    for bad, said in (
        ({"rows": torch.tensor([[0, 0, 12 * PAGE + 1]])}, "beyond the page table"),
        ({"rows": torch.tensor([[3, 0, 5]])}, "beyond the page table"),
        ({"rows": torch.tensor([[-1, 0, 5]])}, "beyond the page table"),
        ({"rows": torch.tensor([[0, 6, 5]])}, "end before they begin"),
        ({"rows": torch.tensor([[0, -1, 5]])}, "end before they begin"),
        ({"rows": torch.tensor([[0, 0, 5], [0, 0, 5]])}, "a row for each"),
        ({"query": query.half()}, "must be float32"),
        ({"latent_": L - 8}, "multiple of 16"),
        ({"kind": "BF16"}, "the cache's size isn't that of its pages"),
        ({"cache": stored[:5]}, "page number lies beyond"),
    ):
        with pytest.raises(ValueError, match=said):
            call(**bad)  # type: ignore[arg-type]


def test_matrices_that_do_not_fit_are_refused() -> None:
    stored, _ = pages("F32")
    both, _ = fused("F32")
    query = torch.randn(1, N, P + R)
    values = latent.HeadBlocks(both, V, P + V, P)
    for keys, heads in ((latent.HeadBlocks(both, P + 2, P + V), N), (latent.HeadBlocks(both, P, P + V, 80), N), (values, 4)):
        with pytest.raises(ValueError, match=r"fit|isn't that of its pages|at least 1"):
            latent.absorbed_attention(
                query[:, :heads].contiguous(), stored, "F32", table(), torch.tensor([[0, 0, 5]]), keys, values, SCALE, 1
            )
