"""Products of many tokens by the CPU kernels: against kernels/reference.py over odd shapes, and the same bits however many tokens
and threads there are. Instruction sets without kernels of their own for that go token by token, and must be as right.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantized import SCALES, block_elements, random_blocks

from ktopt.kernels import cpu, reference

if not cpu.available()[0]:
    pytest.skip(cpu.available()[1], allow_module_level=True)

OWN_KERNELS = ("avx512bf16", "avx512vnni")
FEWEST = 3
"""From so many tokens on these kernels run: MANY_TOKENS in gemm.h."""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(tokens: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(rng(seed).standard_normal((tokens, columns)).astype(np.float32))


def product(weight: cpu.Blocks, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.rows), float("nan"))
    cpu.linear(weight, x, out, threads)
    return out


def within_bounds(kind: str, rows: int, columns: int, x: torch.Tensor, threads: int = 1, slack: float = 1.0) -> bool:
    raw = random_blocks(kind, rows, columns, rng(rows))
    weight, numbers = cpu.blocks(kind, rows, columns, raw), reference.weight(kind, raw, columns)
    error = (product(weight, x, threads) - reference.linear(x, numbers)).abs()
    return bool((error <= reference.linear_error(x, numbers, rounded=True) * slack).all())


@pytest.mark.parametrize("kind", SCALES)
def test_a_product_is_right_for_shapes_that_are_multiples_of_nothing(isa: str, kind: str) -> None:
    for rows, blocks, tokens in ((1, 1, 3), (15, 2, 5), (16, 3, 6), (17, 7, 7), (31, 8, 11), (33, 9, 13), (70, 25, 31)):
        columns = blocks * block_elements(kind)
        assert within_bounds(kind, rows, columns, normal(tokens, columns)), (rows, columns, tokens)


@pytest.mark.parametrize("tokens", [70, 513])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K", "Q2_K"])
def test_long_prompts_are_right_with_two_threads(isa: str, kind: str, tokens: int) -> None:
    assert within_bounds(kind, 45, 1280, normal(tokens, 1280), threads=2)


@pytest.mark.parametrize("kind", SCALES)
def test_extreme_scales_keep_the_bound(isa: str, kind: str) -> None:
    columns = 3 * max(block_elements(kind), 64)
    scales = np.array([0.0, -0.0, 6e-8, -6e-8, 6e-5, 65504.0, -65504.0, 1.0])  # zeros, subnormals, the largest
    raw = random_blocks(kind, 37, columns, rng(1), scales)
    weight, numbers = cpu.blocks(kind, 37, columns, raw), reference.weight(kind, raw, columns)
    x = normal(9, columns)
    error = (product(weight, x) - reference.linear(x, numbers)).abs()
    assert (error <= reference.linear_error(x, numbers, rounded=True) * 1.5).all()


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q8_0", "Q2_K"])
def test_extreme_activations_keep_to_their_token(isa: str, kind: str) -> None:
    raw = random_blocks(kind, 37, 1024, rng())
    weight, numbers = cpu.blocks(kind, 37, 1024, raw), reference.weight(kind, raw, 1024)
    x = normal(8, 1024)
    x[0] = 0
    x[1, 5] = 1e30
    x[2] *= 1e-41  # subnormal: counts as zero
    x[3, :32] = 127.0
    x[4, 300] = float("nan")
    x[5, 300] = float("-inf")
    result = product(weight, x)
    assert (result[0] == 0).all()
    assert not result[4:6].isfinite().any()
    rest = [0, 1, 2, 3, 6, 7]
    error = (result[rest] - reference.linear(x[rest], numbers)).abs()
    assert (error <= reference.linear_error(x[rest], numbers, rounded=True) + 1e-30).all()


@pytest.mark.parametrize("kind", SCALES)
def test_a_token_gives_the_same_bits_whatever_stands_beside_it(kind: str) -> None:
    columns = 4 * max(256, block_elements(kind))
    weight = cpu.blocks(kind, 45, columns, random_blocks(kind, 45, columns, rng()))
    x = normal(70, columns)
    whole = product(weight, x)
    for tokens in range(FEWEST, 70):
        assert torch.equal(product(weight, x[:tokens]), whole[:tokens]), tokens


@pytest.mark.parametrize(("rows", "tokens"), [(1, 600), (33, 600), (300, 40), (3001, 4)])
def test_any_number_of_threads_gives_the_same_bits(rows: int, tokens: int) -> None:
    weight = cpu.blocks("Q5_1", rows, 576, random_blocks("Q5_1", rows, 576, rng()))
    x = normal(tokens, 576)
    alone = product(weight, x)
    for threads in (2, 3, 16):
        assert torch.equal(product(weight, x, threads), alone)


def test_a_prompt_that_is_taken_in_blocks_gives_the_same_bits() -> None:
    weight = cpu.blocks("Q4_K", 40, 4096, random_blocks("Q4_K", 40, 4096, rng()))
    x = normal(1100, 4096)
    whole = product(weight, x, 2)
    for start in range(0, 1100, 100):
        assert torch.equal(product(weight, x[start : start + 100]), whole[start : start + 100])


@pytest.mark.parametrize("columns", [1280, 1056])
def test_bfloat16_activations_are_taken_as_they_are(isa: str, columns: int) -> None:
    weight = cpu.blocks("Q4_1", 37, columns, random_blocks("Q4_1", 37, columns, rng()))
    x = normal(40, columns).bfloat16()
    assert torch.equal(product(weight, x, 2), product(weight, x.float(), 1))


def test_a_result_may_be_a_slice_of_a_wider_one() -> None:
    weight = cpu.blocks("Q8_0", 40, 64, random_blocks("Q8_0", 40, 64, rng()))
    x, wide = normal(9, 64), torch.zeros(9, 70)
    cpu.linear(weight, x, wide[:, 10:50], 1)
    assert torch.equal(wide[:, 10:50], product(weight, x))
    assert not wide[:, :10].any()
    assert not wide[:, 50:].any()


def test_quantised_types_say_where_they_take_many_tokens(isa: str) -> None:
    for kind in cpu.KINDS:
        columns = block_elements(kind)
        weight = cpu.blocks(kind, 1, columns, random_blocks(kind, 1, columns, rng()))
        assert cpu.takes_many(weight) is (kind in SCALES and isa in OWN_KERNELS)
