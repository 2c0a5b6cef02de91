"""`ktopt profile`: what it writes is a hardware file, whose numbers `ktopt place` counts with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktopt.cli import main
from ktopt.hardware import load_hardware
from ktopt.kernels import cpu
from ktopt.measuring import best_s, kernel_rates, measure


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "machine.yaml"
    assert main(["profile", "-o", str(path), "--seconds", "0.001", "--megabytes", "1", "--threads", "1"]) == 0
    return path


def test_what_is_written_is_a_hardware_file_of_this_machine(profile: Path) -> None:
    machine, here = load_hardware(str(profile)), load_hardware("here")
    assert (machine.name, machine.ram_bytes, machine.cores) == (here.name, here.ram_bytes, here.cores)
    assert machine.cpu_features == here.cpu_features
    assert machine.speed.bandwidth_gbs > 0.1
    assert 0 < machine.speed.op_us < 10_000
    kinds = {"float32", "bfloat16", "float16", *(k for k in cpu.KINDS if k not in ("F32", "F16", "BF16") and cpu.available()[0])}
    assert set(machine.speed.matvec_gbs) == set(machine.speed.matmul_gflops) == kinds


def test_place_counts_with_what_was_measured(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", "rules/smollm2/reference.yaml", "--model", "smollm2-135m", "--hardware", str(profile)]) == 0
    assert "taken for granted" not in capsys.readouterr().out


def test_a_time_is_the_least_of_several() -> None:
    waits = iter([0, 0, 0, 0] + [5_000_000] * 3)
    assert best_s(lambda: sum(range(next(waits, 0))), "cpu", 0.0) < 0.05


@pytest.mark.skipif(not cpu.available()[0], reason="the CPU kernels were not built")
def test_a_product_of_a_storage_type_takes_its_bytes_over_its_rate() -> None:
    gbs, gflops = kernel_rates("Q4_K", 0.002, 1)
    assert gbs > 0.01
    assert gflops > gbs  # a weight's half byte is multiplied with many tokens, once each


@pytest.mark.skipif(not cpu.available()[0], reason="the CPU kernels were not built")
def test_products_with_many_tokens_are_of_fewer_weights_so_that_they_take_no_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {}
    monkeypatch.setattr(cpu, "linear", lambda weight, x, out, threads: rows.update({len(x): out.shape[1]}))
    kernel_rates("Q4_K", 0.0, 8)
    assert 8 * rows[256] <= rows[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_without_a_card_there_are_no_devices() -> None:
    assert measure(0.0005, 1)["devices"] == []


@pytest.mark.parametrize(("option", "value"), [("--seconds", "0"), ("--megabytes", "0"), ("--threads", "0")])
def test_numbers_that_cannot_be_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", option, value]) == 2
    assert option in capsys.readouterr().err
