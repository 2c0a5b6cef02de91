"""How fast this machine is: bandwidth of its memories, products by type, what an operation and a transfer take at least.

Products are made as the operators make them: by the CPU kernels where weights are stored as GGUF files have them, by torch in
dtypes. Each number is the best of several tries, since other programs only ever make one slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ktopt.hardware import detect
from ktopt.kernels import cpu
from ktopt.placement import Device, Hardware
from ktopt.weights.ggml_types import BY_NAME

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLUMNS = 4096
PROMPT_TOKENS = 256
FEWER_ROWS = 8
"""One in so many rows is enough for the CPU's products with many tokens, whose time is not that of reading."""
MIB = 1 << 20


def measure(seconds: float = 0.3, megabytes: int = 256, say: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """This machine as a hardware file has it, speeds included.

    seconds     for each number, at least
    megabytes   that are read at a time; more than the caches hold
    say         is told what is measured next
    """
    machine = detect()
    say("memory")
    read = read_gbs("cpu", seconds, megabytes)
    described: dict[str, Any] = {
        "name": machine.name,
        "ram": machine.ram_bytes,
        "cores": machine.cores,
        "cpu_features": sorted(machine.cpu_features),
        "bandwidth": read,
        "op_latency": _rounded(operation_us("cpu", seconds)),
    }
    matvec, matmul = dtype_rates("cpu", seconds, megabytes, say)
    described["bandwidth"] = _rounded(max(read, *matvec.values()))
    for kind in cpu.KINDS if cpu.available()[0] else ():
        if kind not in ("F32", "F16", "BF16"):
            say(kind)
            matvec[kind], matmul[kind] = kernel_rates(kind, seconds, megabytes)
    described |= {"matvec": _all_rounded(matvec), "matmul": _all_rounded(matmul)}
    described["devices"] = [accelerator(device, seconds, megabytes, say) for device in _usable(machine)]
    return described


def _usable(machine: Hardware) -> list[Device]:
    """Accelerators that this torch can use."""
    return [device for device in machine.devices if device.kind == "cuda" and torch.cuda.is_available()]


def accelerator(device: Device, seconds: float, megabytes: int, say: Callable[[str], None]) -> dict[str, Any]:
    """A card as an entry of a hardware file."""
    name = device.name
    matvec, matmul = dtype_rates(name, seconds, megabytes, say)
    say(f"{name}'s memory and link")
    link_gbs, link_us = link(name, seconds, megabytes)
    read = max(read_gbs(name, seconds, megabytes), *matvec.values())
    return {
        "name": name,
        "memory": device.memory_bytes,
        "model": device.model,
        **({"sm": device.sm} if device.sm else {}),
        "bandwidth": _rounded(read),
        "link": _rounded(link_gbs),
        "link_latency": _rounded(link_us),
        "op_latency": _rounded(operation_us(name, seconds)),
        "matvec": _all_rounded(matvec),
        "matmul": _all_rounded(matmul),
    }


def read_gbs(device: str, seconds: float, megabytes: int) -> float:
    """GB/s at which a device reads its memory, at least: a sum over it. A product with one token may read it faster."""
    data = torch.zeros(megabytes * MIB // 4, device=device)
    return megabytes * MIB / best_s(data.sum, device, seconds) / 1e9


def operation_us(device: str, seconds: float) -> float:
    """Microseconds that an operation takes whose work is next to nothing, one of many in a row."""
    few, many = torch.zeros(16, device=device), 64

    def several() -> None:
        for _ in range(many):
            few.add_(1.0)

    return best_s(several, device, seconds) / many * 1e6


def dtype_rates(
    device: str, seconds: float, megabytes: int, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, float]]:
    """GB/s of weights in products with one token, and GFLOP/s with many, by dtype, as torch makes them."""
    matvec, matmul = {}, {}
    for name, dtype in DTYPES.items():
        say(f"{name} on {device}")
        rows = max(16, megabytes * MIB // (COLUMNS * dtype.itemsize))
        weight = torch.zeros(rows, COLUMNS, dtype=dtype, device=device)
        one, several = (torch.zeros(n, COLUMNS, dtype=dtype, device=device) for n in (1, PROMPT_TOKENS))
        matvec[name] = weight.nbytes / best_s(partial(torch.nn.functional.linear, one, weight), device, seconds) / 1e9
        weight = weight[: _rows_for_many(rows, device)]
        time_s = best_s(partial(torch.nn.functional.linear, several, weight), device, seconds)
        matmul[name] = 2 * PROMPT_TOKENS * len(weight) * COLUMNS / time_s / 1e9
    return matvec, matmul


def kernel_rates(kind: str, seconds: float, megabytes: int) -> tuple[float, float]:
    """(GB/s, GFLOP/s) of the CPU kernels' products with weights of a storage type."""
    import numpy

    row_bytes, threads = BY_NAME[kind].row_bytes(COLUMNS), torch.get_num_threads()
    rates = []
    rows = max(16, megabytes * MIB // row_bytes)
    for tokens, count in ((1, rows), (PROMPT_TOKENS, _rows_for_many(rows, "cpu"))):
        weight = cpu.blocks(kind, count, COLUMNS, numpy.zeros(count * row_bytes, numpy.uint8), threads)
        x, out = torch.zeros(tokens, COLUMNS), torch.empty(tokens, count)
        time_s = best_s(partial(cpu.linear, weight, x, out, threads), "cpu", seconds)
        rates.append((weight.nbytes if tokens == 1 else 2 * PROMPT_TOKENS * count * COLUMNS) / time_s / 1e9)
    return rates[0], rates[1]


def _rows_for_many(rows: int, device: str) -> int:
    return max(16, rows // FEWER_ROWS) if device == "cpu" else rows


def link(device: str, seconds: float, megabytes: int) -> tuple[float, float]:
    """(GB/s, microseconds) of copies from main memory to a device: of large ones, and of one as small as a number."""
    large, small = torch.zeros(megabytes * MIB, dtype=torch.uint8).pin_memory(), torch.zeros(1).pin_memory()
    there, there_small = torch.empty_like(large, device=device), torch.empty_like(small, device=device)
    rate = large.nbytes / best_s(lambda: there.copy_(large, non_blocking=True), device, seconds) / 1e9
    return rate, best_s(lambda: there_small.copy_(small, non_blocking=True), device, seconds) * 1e6


def best_s(call: Callable[[], Any], device: str, seconds: float) -> float:
    """The least time of a call, of as many as take so long together, three at least; the first one isn't counted."""
    wait = (lambda: torch.cuda.synchronize(device)) if device != "cpu" else lambda: None
    call()
    wait()
    best, spent, count = float("inf"), 0.0, 0
    while spent < seconds or count < 3:
        start = time.perf_counter()
        call()
        wait()
        took = time.perf_counter() - start
        best, spent, count = min(best, took), spent + took, count + 1
    return max(best, 1e-9)


def _rounded(number: float) -> float:
    """To three digits: no more are true."""
    return float(f"{number:.3g}")


def _all_rounded(rates: dict[str, float]) -> dict[str, float]:
    return {kind: _rounded(rate) for kind, rate in rates.items()}
