"""The machine that a plan is for: this one, a preset such as "2x24GB", or one described in a file (FILE_FORMAT). No torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktopt.cards import CARDS, USUAL, card_named, card_sold_as
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.placement import DEVICE_KINDS, HIGHEST_NUMBER, Device, Hardware, Speed, canonical_device
from ktopt.render.style import one_line

FILE_FORMAT = """\
--hardware names the machine that is planned for: "here" (this one), a preset, or a file that describes it.

A preset is "cpu", COUNTxSIZE or COUNTxCARD, with RAM after a plus sign where it matters: 8x80GB, 1x24GB+128GB, 2x3090+128GB. Sizes
in presets are GiB, as GPU makers mean them.

An entry of devices in a file may also have `link`, GB/s between its memory and main memory, and `link_latency`, microseconds before
a transfer's first byte. A card that is known by its `model` has its maker's bandwidth.

A file is what `ktopt doctor --json` prints on the machine, or a mapping in YAML or JSON:

    name: my workstation            # what plans call it; the file's name if left out
    ram: 128GiB                     # a size, or bytes; 0 or left out: not known, and then not checked
    cores: 32
    cpu_features: [avx512_vnni]     # as /proc/cpuinfo names them; "amx" stands for amx_tile
    devices:
      - {name: "cuda:0", memory: 24GiB, model: RTX 4090, sm: 89}
      - {name: cuda, count: 4, memory: 80GiB, sm: 90}      # the next four: cuda:1 to cuda:4
    # how fast it is, for ktopt place; all of it may be left out, and devices may have the same keys
    bandwidth: 80                   # GB/s at which main memory is read
    op_latency: 2                   # microseconds that an operation takes beside its work
    matvec: {Q4_K: 62}              # GB/s of weights in products with one token, by storage type or dtype
    matmul: {bfloat16: 1900}        # GFLOP/s in products with many tokens, likewise
"""

GIB = 1 << 30
FILE_LIMIT_BYTES = 64 * 1024
MAX_DEVICES = HIGHEST_NUMBER + 1
MAX_DEPTH = 16
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_PRESET = re.compile(r"(?:cpu|(\d{1,3})x(?:(\d{1,4})GB|([\w-]+)))(?:\+(\d{1,6})([GT])B)?", re.IGNORECASE)
_SPEEDS = {"bandwidth": "bandwidth_gbs", "op_latency": "op_us", "matvec": "matvec_gbs", "matmul": "matmul_gflops"}
_LINK_SPEEDS = {"link": "link_gbs", "link_latency": "link_us"}
PRESETS = ("cpu", "1x24GB", "2x24GB", "4x24GB", "8x24GB", "1x48GB", "1x80GB", "2x80GB", "4x80GB", "8x80GB")
"""Presets to suggest; any COUNTxSIZE works, and COUNT times a card of cards.py."""


def load_hardware(text: str) -> Hardware:
    """The machine that `--hardware` names: "here" (this one), a preset, or a file. UsageError where it is none of
    them, KtoptError for a file that describes no machine."""
    if text == "here":
        return detect()
    if found := preset(text):
        return found
    path = Path(text)
    if not path.exists():
        raise UsageError(
            f"--hardware {text}: no such file, and no preset; presets are {', '.join(PRESETS)} (any COUNTxSIZE, or "
            f"COUNT times one of {', '.join(card.name for card in CARDS)}; with main memory in whole GB after a +, as in "
            "1x24GB+64GB), or here"
        )
    return read_hardware(path)


def preset(text: str) -> Hardware | None:
    """The machine of a preset name, or None where `text` is none. A size alone has the compute capability and the speed of the
    usual card of that size."""
    found = _PRESET.fullmatch(text)
    if not found:
        return None
    count, size, ram = (int(group or 0) for group in found.group(1, 2, 4))
    ram *= 1024 if (found[5] or "").upper() == "T" else 1
    card = card_named(found[3]) if found[3] else card_named(USUAL.get(size, ""))
    if found[3] and card is None:
        return None
    size = card.memory_gib if card is not None else size
    if found[1] is not None and (not 0 < count <= MAX_DEVICES or not size):
        raise UsageError(f"--hardware {text}: a preset has 1 to {MAX_DEVICES} cards, of 1 GB at least")
    model = card.name if card is not None and found[3] else f"{size} GB card"
    speed = Speed(card.bandwidth_gbs, card.link_gbs) if card is not None else Speed()
    devices = tuple(Device(f"cuda:{i}", size * GIB, model, card.sm if card is not None else 80, speed) for i in range(count))
    return Hardware(text, devices, ram_bytes=ram * GIB)


def parse_size(value: Any) -> int | None:
    """Bytes of 24GiB, "1.5 TB" or a whole number of bytes; None for what is no size."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    found = _SIZE.fullmatch(str(value).strip())
    if not found:
        return None
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()])


def read_hardware(path: Path) -> Hardware:
    """A hardware file (see FILE_FORMAT). KtoptError names the file and the key that is wrong."""
    data = _load_yaml(path)
    if not isinstance(data, dict):
        raise KtoptError(f"{path}: a hardware file is a mapping with name, ram, cores, cpu_features and devices")
    if "gpus" in data and "ktopt" in data:
        data = _from_doctor(data)
    _known_keys(path, "", data, ("name", "ram", "cores", "cpu_features", "devices", *_SPEEDS))
    devices: list[Device] = []
    entries = data.get("devices") or []
    if not isinstance(entries, list):
        raise KtoptError(f"{path}: devices must be a list")
    for number, entry in enumerate(entries):
        devices += _read_devices(path, f"devices[{number}]", entry, devices)
    features = data.get("cpu_features") or []
    if not isinstance(features, list) or not all(isinstance(f, str) for f in features):
        raise KtoptError(f"{path}: cpu_features must be a list of names such as avx512_vnni")
    name = _line(path, "name", data.get("name", one_line(path.stem)))
    return Hardware(
        name=name,
        devices=tuple(devices),
        ram_bytes=_size(path, "ram", data.get("ram", 0)),
        cores=_count(path, "cores", data.get("cores", 0), 0, 1 << 16),
        cpu_features=frozenset(features),
        speed=_read_speed(path, "", data, _SPEEDS),
    )


def _from_doctor(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What `ktopt doctor --json` printed, as a hardware file has it."""
    cpu = facts.get("cpu")
    cpu = cpu if isinstance(cpu, Mapping) else {}
    gpus = facts["gpus"] if isinstance(facts["gpus"], list) else []
    names = {"memory_bytes": "memory"}
    return {
        "name": facts.get("name") or "machine",
        "ram": facts.get("ram_bytes") or 0,
        "cores": cpu.get("cores") or 0,
        "cpu_features": cpu.get("flags") or cpu.get("features") or [],
        "devices": [{names.get(k, k): v for k, v in gpu.items()} if isinstance(gpu, Mapping) else gpu for gpu in gpus],
    }


def _read_devices(path: Path, where: str, entry: Any, before: list[Device]) -> list[Device]:
    if not isinstance(entry, dict):
        raise KtoptError(f"{path}: {where} must be a mapping with name and memory")
    _known_keys(path, where + ".", entry, ("name", "memory", "model", "sm", "count", *_SPEEDS, *_LINK_SPEEDS))
    name = entry.get("name")
    if not isinstance(name, str):
        raise KtoptError(f'{path}: {where} needs a name, such as "cuda:0"')
    if "memory" not in entry:
        raise KtoptError(f"{path}: {where} ({name}) needs memory, such as 24GiB")
    memory = _size(path, f"{where}.memory", entry["memory"])
    model = _line(path, f"{where}.model", str(entry.get("model", "")))
    sm = entry.get("sm")
    if sm is not None:
        sm = _count(path, f"{where}.sm", sm, 10, 999)
    if name in DEVICE_KINDS and "count" in entry:
        first = sum(d.kind == name for d in before)
        count = _count(path, f"{where}.count", entry["count"], 1, MAX_DEVICES)
        names = [f"{name}:{first + i}" for i in range(count)]
    else:
        names = [name]
    try:
        speed = _read_speed(path, f"{where}.", entry, {**_SPEEDS, **_LINK_SPEEDS})
        made = [_known_card(Device(canonical_device(n), memory, model, sm, speed)) for n in names]
    except ValueError as error:
        raise KtoptError(f"{path}: {where}: {error}") from None
    taken = {d.name for d in before}
    for device in made:
        if device.name == "cpu":
            raise KtoptError(f"{path}: {where}: the cpu is no entry of devices; give ram, cores and cpu_features instead")
        if device.name in taken:
            raise KtoptError(f"{path}: {where}: {device.name} is given twice")
    return made


def _read_speed(path: Path, where: str, data: Mapping[str, Any], keys: Mapping[str, str]) -> Speed:
    """The speeds of a hardware file's mapping: numbers, or mappings of them by type. KtoptError for what is none."""
    values: dict[str, Any] = {}
    for key, name in keys.items():
        value = data.get(key)
        if value is None:
            continue
        if key in ("matvec", "matmul"):
            if not isinstance(value, dict):
                raise KtoptError(f"{path}: {where}{key} must be a mapping of types and numbers, such as {{Q4_K: 610}}")
            values[name] = {str(kind): _positive(path, f"{where}{key}.{kind}", each) for kind, each in value.items()}
        else:
            values[name] = _positive(path, f"{where}{key}", value)
    return Speed(**values)


def _positive(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise KtoptError(f"{path}: {key} must be a number above 0, not {value!r}")
    return float(value)


def _known_card(device: Device) -> Device:
    """The device with its maker's bandwidth and link, where it is a card that is known and nothing else says them."""
    card = card_sold_as(device.model, device.memory_bytes) if device.model else None
    if card is None:
        return device
    speed = replace(
        device.speed,
        bandwidth_gbs=device.speed.bandwidth_gbs or card.bandwidth_gbs,
        link_gbs=device.speed.link_gbs or card.link_gbs,
    )
    return replace(device, speed=speed)


def _known_keys(path: Path, where: str, data: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    from ktopt.operator import nearest

    for key in data:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"; did you mean {near}?" if near else f"; known keys are {', '.join(known)}"
            raise KtoptError(f"{path}: unknown key {where}{key}{hint}")


def _size(path: Path, key: str, value: Any) -> int:
    size = parse_size(value)
    if size is None:
        raise KtoptError(f"{path}: {key} must be a size such as 24GiB, not {value!r}")
    return size


def _line(path: Path, key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise KtoptError(f"{path}: {key} must be a line of text, not {value!r}")
    return value


def _count(path: Path, key: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise KtoptError(f"{path}: {key} must be a whole number from {least} to {most}, not {value!r}")
    return value


def _load_yaml(path: Path) -> Any:
    """The file's YAML (JSON is YAML). Anchors are refused and depth is bounded, so that no file can take long."""
    import yaml

    try:
        raw = path.read_bytes() if path.stat().st_size <= FILE_LIMIT_BYTES else None
    except OSError as error:
        raise KtoptError(f"{path}: can't be read: {error.strerror}") from None
    if raw is None:
        raise KtoptError(f"{path}: larger than {FILE_LIMIT_BYTES} bytes, so no hardware file")
    try:
        text = raw.decode("utf-8")
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1 if event.start_mark else 1
            if isinstance(event, yaml.AliasEvent):
                raise KtoptError(f"{path}: line {line}: anchors and aliases aren't used in a hardware file")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise KtoptError(f"{path}: line {line}: nested too deeply")
        return yaml.safe_load(text)
    except UnicodeDecodeError:
        raise KtoptError(f"{path}: not a text file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}:" if mark else ""
        raise KtoptError(f"{path}:{place} not valid YAML: {getattr(error, 'problem', error)}") from None
    except (ValueError, TypeError) as error:  # a scalar such as 2024-99-99, or an unhashable key
        raise KtoptError(f"{path}: not valid YAML: {error}") from None


def detect() -> Hardware:
    """This machine, from /proc and nvidia-smi. What can't be seen (another OS, no driver) is left empty or 0."""
    features = cpu_features()
    return Hardware(
        name=platform.node() or "this machine",
        devices=nvidia_devices(),
        ram_bytes=ram_bytes(),
        cores=os.cpu_count() or 0,
        cpu_features=features,
    )


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The first processor's flags, as Linux names them, and "amx" where there are AMX tiles."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    if "amx_tile" in flags:
        flags.add("amx")
    return frozenset(flags)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or "" where it isn't told."""
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return platform.processor()
    return found[1].strip() if found else platform.processor()


def ram_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The machine's memory, all of it, in bytes; 0 where it can't be told."""
    try:
        found = re.search(r"^MemTotal:\s*(\d+) kB", meminfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def nvidia_devices(command: str = "nvidia-smi") -> tuple[Device, ...]:
    """NVIDIA cards as nvidia-smi lists them; none where there is no driver or it doesn't answer in 5 seconds."""
    if not shutil.which(command):
        return ()
    query = [command, "--query-gpu=index,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_nvidia(listed)


def parse_nvidia(listed: str) -> tuple[Device, ...]:
    """Devices from nvidia-smi's "index, name, MiB, compute capability" lines; lines in another form are skipped."""
    devices = []
    for line in listed.splitlines():
        fields = [f.strip() for f in line.split(",")]
        if len(fields) == 4 and fields[0].isdecimal() and fields[2].isdecimal():
            major, _, minor = fields[3].partition(".")
            sm = int(major + minor) if (major + minor).isdecimal() else None
            devices.append(_known_card(Device(f"cuda:{fields[0]}", int(fields[2]) << 20, fields[1], sm)))
    return tuple(devices)
