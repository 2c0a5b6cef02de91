"""Machines: presets, files and detection."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from ktopt.cards import card_sold_as
from ktopt.diagnostics import KtoptError
from ktopt.hardware import GIB, cpu_features, detect, load_hardware, nvidia_devices, parse_nvidia, parse_size, ram_bytes

GOOD = """
name: workstation
ram: 128GiB
cores: 32
cpu_features: [avx512_vnni, amx]
devices:
  - {name: "cuda:0", memory: 24GiB, model: RTX 4090, sm: 89}
  - {name: cuda, count: 2, memory: 80GiB, sm: 90}
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "box.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_preset_has_its_cards_and_no_stated_ram() -> None:
    machine = load_hardware("2x24GB")
    assert [d.name for d in machine.devices] == ["cuda:0", "cuda:1"]
    assert machine.devices[0].memory_bytes == 24 * GIB
    assert machine.devices[0].sm == 89
    assert machine.ram_bytes == 0
    assert load_hardware("8x80GB").devices[7].sm == 90


def test_a_preset_takes_ram_after_a_plus() -> None:
    assert load_hardware("1x24GB+128GB").ram_bytes == 128 * GIB
    assert load_hardware("cpu+32GB").ram_bytes == 32 * GIB
    assert load_hardware("2x80GB+2TB").ram_bytes == 2048 * GIB
    assert load_hardware("cpu").devices == ()


@pytest.mark.parametrize("text", ["0x24GB", "1x0GB", "129x24GB", "999x24GB"])
def test_an_impossible_preset_is_refused(text: str) -> None:
    with pytest.raises(KtoptError, match="a preset has"):
        load_hardware(text)


def test_what_is_neither_preset_nor_file_lists_the_presets() -> None:
    with pytest.raises(KtoptError, match=r"no such file.*1x24GB.*with main memory in whole GB after a \+, as in 1x24GB\+64GB"):
        load_hardware("two-big-ones")


def test_a_file_describes_a_machine(tmp_path: Path) -> None:
    machine = load_hardware(written(tmp_path, GOOD))
    assert machine.name == "workstation"
    assert machine.ram_bytes == 128 * GIB
    assert [(d.name, d.memory_bytes // GIB, d.sm) for d in machine.devices] == [
        ("cuda:0", 24, 89),
        ("cuda:1", 80, 90),
        ("cuda:2", 80, 90),
    ]
    assert "amx" in machine.cpu_features


def test_a_json_file_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text('{"ram": "16 GB", "devices": [{"name": "cuda:0", "memory": 1000}]}')
    machine = load_hardware(str(path))
    assert (machine.name, machine.ram_bytes, machine.devices[0].memory_bytes) == ("box", 16 * 10**9, 1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "is a mapping"),
        ("rams: 3", "unknown key rams; did you mean ram"),
        ("ram: lots", "ram must be a size"),
        ("ram: -4", "ram must be a size"),
        ("cores: two", "cores must be a whole number"),
        ("devices: {}\nname: 7", "name must be a line of text"),
        ('name: "a\\e[31mb"', "name must be a line of text"),
        ('devices: [{name: mps, memory: 1GiB, model: "a\\nb"}]', "devices[0].model must be a line of text"),
        ("devices: [{name: gpu, memory: 1GiB}]", "'gpu' is not a device"),
        ("devices: [{name: 'cuda:0'}]", "needs memory"),
        ("devices: [{memory: 1GiB}]", "needs a name"),
        ("devices: [{name: cpu, memory: 1GiB}]", "give ram, cores"),
        ("devices: [{name: 'cuda:0', memory: 1GiB}, {name: cuda, memory: 1GiB}]", "given twice"),
        ("devices: [{name: cuda, count: 99999999999, memory: 1GiB}]", "from 1 to 128"),
        ("cpu_features: avx", "must be a list of names"),
        ("a: [", "not valid YAML"),
        ("ram: 2024-99-99", "not valid YAML"),
        ("? {a: 1}\n: 2", "not valid YAML"),
        ("a: &a [1]\nb: *a", "line 2: anchors"),
        ("[" * 5000, "nested too deeply"),
        ("\x00", "not valid YAML"),
        ("#" * 70000, "larger than"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    start = time.process_time()
    with pytest.raises(KtoptError) as caught:
        load_hardware(path)
    assert message in str(caught.value)
    assert path in str(caught.value)
    assert time.process_time() - start < 1


def test_a_folder_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KtoptError, match="can't be read"):
        load_hardware(str(tmp_path))
    binary = tmp_path / "x"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KtoptError, match="not a text file"):
        load_hardware(str(binary))


def test_sizes() -> None:
    assert parse_size("24GiB") == 24 * GIB
    assert parse_size("1.5 TB") == 1_500_000_000_000
    assert parse_size(7) == 7
    assert parse_size(True) is None
    assert parse_size("24 apples") is None


def test_detection_agrees_with_the_kernel() -> None:
    machine = detect()
    total_kb = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert machine.ram_bytes == total_kb * 1024
    assert machine.cores >= 1


def test_amx_tiles_are_called_amx(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: avx2 amx_tile\n\nprocessor : 1\nflags : sse\n")
    assert cpu_features(cpuinfo) == {"avx2", "amx_tile", "amx"}
    assert cpu_features(tmp_path / "none") == frozenset()
    assert ram_bytes(tmp_path / "none") == 0


def test_cards_come_from_nvidia_smi(tmp_path: Path) -> None:
    script = tmp_path / "fake-smi"
    script.write_text("#!/bin/sh\necho '0, NVIDIA H100, 81559, 9.0'\necho '1, NVIDIA RTX 4090, 24564, 8.9'\necho oops\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    assert [(d.name, d.sm) for d in nvidia_devices(str(script))] == [("cuda:0", 90), ("cuda:1", 89)]
    assert nvidia_devices("no-such-command-here") == ()
    assert parse_nvidia("0, X, 100, [N/A]")[0].sm is None


def test_a_preset_may_name_a_card_with_what_its_maker_publishes() -> None:
    machine = load_hardware("2x3090+128GB")
    assert [(d.name, d.model, d.memory_bytes // GIB, d.sm) for d in machine.devices] == [
        ("cuda:0", "3090", 24, 86),
        ("cuda:1", "3090", 24, 86),
    ]
    assert (machine.devices[0].speed.bandwidth_gbs, machine.devices[0].speed.link_gbs) == (936, 31.5)
    assert machine.ram_bytes == 128 * GIB
    assert load_hardware("8xA100-80").devices[7].memory_bytes == 80 * GIB
    assert load_hardware("1xmi300x").devices[0].sm is None
    assert load_hardware("1x24GB").devices[0].speed.bandwidth_gbs == 1008
    assert load_hardware("1x20GB").devices[0].speed.bandwidth_gbs == 0
    with pytest.raises(KtoptError, match=r"COUNT times one of T4, .*MI300X"):
        load_hardware("2x3095")


@pytest.mark.parametrize(
    ("model", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "4070TiSuper"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3060 Ti", None),
        ("NVIDIA A10G", None),
    ],
)
def test_a_card_is_known_by_the_name_that_its_driver_gives(model: str, card: str | None) -> None:
    found = card_sold_as(model, 40 * GIB if "40GB" in model else 80 * GIB)
    assert (found.name if found else None) == card


def test_a_file_says_how_fast_things_are(tmp_path: Path) -> None:
    text = (
        "bandwidth: 80\nmatvec: {Q4_K: 41.5}\ndevices:\n"
        "  - {name: 'cuda:0', memory: 24GiB, link: 25, link_latency: 8, op_latency: 4, matmul: {bfloat16: 70000}}\n"
        "  - {name: 'cuda:1', memory: 24GiB, model: RTX 3090, bandwidth: 900}\n"
    )
    machine = load_hardware(written(tmp_path, text))
    assert (machine.speed.bandwidth_gbs, machine.speed.matvec_gbs) == (80, {"Q4_K": 41.5})
    first, second = (d.speed for d in machine.devices)
    assert (first.link_gbs, first.link_us, first.op_us, first.matmul_gflops) == (25, 8, 4, {"bfloat16": 70000})
    assert (second.bandwidth_gbs, second.link_gbs) == (900, 31.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bandwidth: fast", "bandwidth must be a number above 0, not 'fast'"),
        ("matvec: 5", "matvec must be a mapping of types"),
        ("link: 5", "unknown key link"),
        ("devices: [{name: cuda, memory: 1GB, op_latency: -1}]", r"devices\[0\].op_latency must be a number above 0"),
    ],
)
def test_a_speed_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(KtoptError, match=message):
        load_hardware(written(tmp_path, text))
