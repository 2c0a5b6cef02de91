"""The CPU kernels: every storage type on every instruction set against kernels/reference.py, which is gguf's dequantiser and a
product in float64, with the error that rounding activations to 8 bits allows.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized import SCALES, block_elements, random_blocks

from ktopt.cli import main
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.kernels import cpu, reference

if not cpu.available()[0]:
    pytest.skip(cpu.available()[1], allow_module_level=True)

PLAIN = [kind for kind in cpu.KINDS if kind not in SCALES]
ROWS = 37


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    yield
    cpu.use_isa(None)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def allowed_error(kind: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return reference.linear_error(x, weight, rounded=kind not in PLAIN)


def product(weight: cpu.Blocks, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.rows), float("nan"))
    cpu.linear(weight, x, out, threads)
    return out


@pytest.mark.parametrize("kind", cpu.KINDS)
def test_a_product_is_right_for_shapes_that_are_multiples_of_nothing(isa: str, kind: str) -> None:
    elements = block_elements(kind)
    for blocks in (1, 2, 3, 4, 5, 6, 7, 8, 19):
        columns = elements * blocks if elements > 1 else blocks * 7
        raw = random_blocks(kind, ROWS, columns, rng(blocks))
        weight, numbers = cpu.blocks(kind, ROWS, columns, raw), reference.weight(kind, raw, columns)
        for tokens in (1, 2, 3, 4, 7):
            x = torch.from_numpy(rng(tokens).standard_normal((tokens, columns)).astype(np.float32))
            error = (product(weight, x) - reference.linear(x, numbers)).abs()
            assert (error <= allowed_error(kind, x, numbers)).all(), (blocks, tokens)


@pytest.mark.parametrize("kind", cpu.KINDS)
def test_weights_dequantise_to_what_gguf_makes_of_them(isa: str, kind: str) -> None:
    columns = 7 * block_elements(kind)
    raw = random_blocks(kind, ROWS, columns, rng())
    weight, expected = cpu.blocks(kind, ROWS, columns, raw), reference.weight(kind, raw, columns)
    wide, narrow = torch.empty(ROWS, columns), torch.empty(5, columns, dtype=torch.bfloat16)
    cpu.dequantize(weight, wide, threads=2)
    cpu.dequantize(weight, narrow, threads=1, first=30)
    assert torch.equal(wide, expected)
    assert torch.equal(narrow, expected[30:35].bfloat16())


@pytest.mark.parametrize("kind", cpu.KINDS)
def test_chosen_rows_are_those_that_gguf_makes(isa: str, kind: str) -> None:
    columns = 7 * block_elements(kind)
    raw = random_blocks(kind, ROWS, columns, rng())
    weight, expected = cpu.blocks(kind, ROWS, columns, raw), reference.weight(kind, raw, columns)
    ids = torch.from_numpy(rng(1).integers(0, ROWS, 300))
    wide, narrow = torch.empty(300, columns), torch.empty(300, columns, dtype=torch.bfloat16)
    cpu.rows(weight, ids, wide, threads=2)
    cpu.rows(weight, ids, narrow, threads=1)
    assert torch.equal(wide, expected[ids])
    assert torch.equal(narrow, expected[ids].bfloat16())


def test_rows_that_are_not_there_and_results_that_do_not_fit_are_refused() -> None:
    weight = cpu.blocks("Q4_1", 4, 64, random_blocks("Q4_1", 4, 64, rng()))
    for bad in (-1, 4, 1 << 40, -(1 << 62)):
        with pytest.raises(IndexError, match=rf"id {bad} \(at place 1\) is none of the 4 rows"):
            cpu.rows(weight, torch.tensor([3, bad]), torch.empty(2, 64), 1)
    for ids, out in (
        (torch.tensor([1]), torch.empty(2, 64)),
        (torch.tensor([1]), torch.empty(1, 32)),
        (torch.tensor([1], dtype=torch.int32), torch.empty(1, 64)),
        (torch.tensor([1.0], dtype=torch.float64), torch.empty(1, 64)),
        (torch.tensor([1]), torch.empty(1, 64, dtype=torch.float64)),
        (torch.tensor([1, 2, 3, 0])[::2], torch.empty(2, 64)),
    ):
        with pytest.raises(ValueError, match=r"fit|must be"):
            cpu.rows(weight, ids, out, 1)
    for count in (0, -1, 1 << 62):
        with pytest.raises(ValueError, match="no ids"):
            cpu._needed().rows(*weight.call, torch.tensor([1]).data_ptr(), count, torch.empty(64).data_ptr(), 0, 1)


@pytest.mark.parametrize("kind", SCALES)
def test_extreme_scales_keep_the_bound(isa: str, kind: str) -> None:
    columns = 3 * max(block_elements(kind), 64)
    scales = np.array([0.0, -0.0, 6e-8, -6e-8, 6e-5, 65504.0, -65504.0, 1.0])  # zeros, subnormals, the largest
    raw = random_blocks(kind, ROWS, columns, rng(1), scales)
    weight, numbers = cpu.blocks(kind, ROWS, columns, raw), reference.weight(kind, raw, columns)
    x = torch.from_numpy(rng(2).standard_normal((2, columns)).astype(np.float32))
    error = (product(weight, x) - reference.linear(x, numbers)).abs()
    assert (error <= allowed_error(kind, x, numbers) * 1.5).all()


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q8_0"])
def test_extreme_activations_keep_the_bound(isa: str, kind: str) -> None:
    columns = 1024
    raw = random_blocks(kind, ROWS, columns, rng())
    weight, numbers = cpu.blocks(kind, ROWS, columns, raw), reference.weight(kind, raw, columns)
    x = torch.from_numpy(rng(3).standard_normal((4, columns)).astype(np.float32))
    x[0] = 0
    x[1, 5] = 1e30
    x[2] *= 1e-41  # subnormal: counts as zero
    x[3, :32] = 127.0
    result = product(weight, x)
    error = (result - reference.linear(x, numbers)).abs()
    assert (result[0] == 0).all()
    assert (error <= allowed_error(kind, x, numbers) + 1e-30).all()


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "BF16"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_activations_that_are_not_finite_give_no_finite_result(isa: str, kind: str, bad: float) -> None:
    raw = random_blocks(kind, ROWS, 512, rng())
    x = torch.ones(1, 512)
    x[0, 300] = bad
    assert not product(cpu.blocks(kind, ROWS, 512, raw), x).isfinite().any()


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "F32", "F16"])
def test_bfloat16_activations_are_taken_as_they_are(isa: str, kind: str) -> None:
    columns = 512
    weight = cpu.blocks(kind, ROWS, columns, random_blocks(kind, ROWS, columns, rng()))
    x = torch.from_numpy(rng(4).standard_normal((3, columns)).astype(np.float32)).bfloat16()
    assert torch.equal(product(weight, x), product(weight, x.float()))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 15, 700, 3001])
def test_any_number_of_threads_gives_the_same_bits(rows: int, threads: int) -> None:
    columns = 576
    weight = cpu.blocks("Q4_1", rows, columns, random_blocks("Q4_1", rows, columns, rng()))
    x = torch.from_numpy(rng(5).standard_normal((2, columns)).astype(np.float32))
    alone = product(weight, x, 1)
    for _ in range(20):
        assert torch.equal(product(weight, x, threads), alone)


def test_two_python_threads_can_call_at_once() -> None:
    weight = cpu.blocks("Q4_K", 2000, 1024, random_blocks("Q4_K", 2000, 1024, rng()))
    inputs = [torch.randn(1, 1024), torch.randn(3, 1024)]
    expected = [product(weight, x) for x in inputs]
    wrong: list[int] = []

    def call(which: int) -> None:
        for _ in range(100):
            if not torch.equal(product(weight, inputs[which], 2), expected[which]):
                wrong.append(which)

    callers = [threading.Thread(target=call, args=(which,)) for which in (0, 1)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def _in_child(results: multiprocessing.Queue[bool]) -> None:
    weight = cpu.blocks("Q8_0", 3000, 512, random_blocks("Q8_0", 3000, 512, rng()))
    x = torch.ones(1, 512)
    results.put(torch.equal(product(weight, x, 2), product(weight, x, 1)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    _in_child(multiprocessing.SimpleQueue())  # type: ignore[arg-type]  # the parent's threads are there before it forks
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(results,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert results.get()


def test_a_result_may_be_a_slice_of_a_wider_one() -> None:
    weight = cpu.blocks("Q4_0", 20, 64, random_blocks("Q4_0", 20, 64, rng()))
    x, wide = torch.randn(3, 64), torch.zeros(3, 50)
    cpu.linear(weight, x, wide[:, 10:30], 1)
    assert torch.equal(wide[:, 10:30], product(weight, x))
    assert not wide[:, :10].any()
    assert not wide[:, 30:].any()


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_scales_that_are_not_finite_are_refused_with_their_row(kind: str, bad: float) -> None:
    columns = 2 * block_elements(kind)
    for place in SCALES[kind]:
        raw = random_blocks(kind, ROWS, columns, rng())
        blocks = raw.reshape(2 * ROWS, -1)
        blocks[2 * 23 + 1, place : place + 2] = np.array([bad], dtype=np.float16).view(np.uint8)
        with pytest.raises(KtoptError, match="row 23 has a scale that is infinite or not a number"):
            cpu.blocks(kind, ROWS, columns, raw, threads=2)


def test_bytes_that_are_not_the_matrix_are_refused() -> None:
    raw = random_blocks("Q4_1", 4, 64, rng())
    for rows, columns in ((5, 64), (4, 96), (4, 63), (0, 64), (4, 0), (-4, 64), (1 << 40, 1 << 40)):
        with pytest.raises((KtoptError, ValueError)):
            cpu.blocks("Q4_1", rows, columns, raw)
    with pytest.raises(KtoptError, match="no CPU kernel for the storage type IQ2_XS"):
        cpu.blocks("IQ2_XS", 4, 256, raw)


def test_activations_and_results_that_do_not_fit_are_refused() -> None:
    weight = cpu.blocks("Q4_1", 4, 64, random_blocks("Q4_1", 4, 64, rng()))
    for x, out in (
        (torch.ones(1, 32), torch.empty(1, 4)),
        (torch.ones(1, 64), torch.empty(1, 5)),
        (torch.ones(2, 64), torch.empty(1, 4)),
        (torch.ones(64, 1).T[:, :64].expand(2, 64), torch.empty(2, 4)),
        (torch.ones(1, 64, dtype=torch.float64), torch.empty(1, 4)),
        (torch.ones(1, 64), torch.empty(1, 4, dtype=torch.bfloat16)),
        (torch.ones(1, 64), torch.empty(4, 2)[:, :1].T),
    ):
        with pytest.raises(ValueError, match=r"fit|must be"):
            cpu.linear(weight, x, out, 1)
    with pytest.raises(ValueError, match="doesn't fit"):
        cpu.dequantize(weight, torch.empty(3, 64), 1, first=2)


def test_the_extension_checks_sizes_itself() -> None:
    weight = cpu.blocks("Q4_1", 4, 64, random_blocks("Q4_1", 4, 64, rng()))
    extension = cpu._needed()
    kind, address, rows, columns, nbytes = weight.call
    for call in (
        (kind, 0, rows, columns, nbytes),
        (kind, address, rows + 1, columns, nbytes),
        (kind, address, rows, columns + 1, nbytes),
        (kind, address, 1 << 62, 1 << 62, nbytes),
        (9, address, rows, columns, nbytes),
        (-1, address, rows, columns, nbytes),
        (1 << 33, address, rows, columns, nbytes),
    ):
        with pytest.raises(ValueError, match=r"type -?\d+"):
            extension.first_bad_row(*call, 1)
    with pytest.raises(TypeError, match="takes 6 arguments, not 1"):
        extension.first_bad_row(1)


def run_with_isa(isa: str) -> subprocess.CompletedProcess[str]:
    code = "from ktopt.kernels import cpu, reference; print(cpu.available(), cpu.isa())"
    environment = {**os.environ, cpu.ISA_VARIABLE: isa}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent)


def test_the_environment_forces_an_instruction_set() -> None:
    assert run_with_isa("scalar").stdout.split()[-1] == "scalar"
    assert "KTOPT_CPU_ISA=mmx: this CPU runs" in run_with_isa("mmx").stderr


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    with pytest.raises(UsageError, match="this CPU can't run avx1024; it runs"):
        cpu.use_isa("avx1024")


def test_doctor_names_the_instruction_set_or_what_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["doctor"])
    assert f"cpu kernels   {cpu.isas()[0]}" in capsys.readouterr().out
    monkeypatch.setattr(cpu, "available", lambda: (False, "the CPU kernels were not built"))
    main(["doctor"])
    assert (
        "the CPU kernels were not built; until then KLinearCPUInfer, KExpertsCPU and KEmbeddingCPU compute by torch"
        in capsys.readouterr().out
    )
