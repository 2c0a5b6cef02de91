"""What a selector can ask: the fields of a module, of the model's config, and of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktopt.graph import Module
from ktopt.pattern import Pattern
from ktopt.placement import Hardware
from ktopt.selector.expression import Equal, Matches, Order, Range, Unequal

TEXT_FIELDS = ("path", "name", "class", "type", "dtype", "quant")
NUMBER_FIELDS = ("layer", "expert", "numel", "bytes")
HARDWARE_FIELDS = ("cuda_sm", "cuda_count", "vram", "ram", "cores")
FIELDS = (*TEXT_FIELDS, *NUMBER_FIELDS, "shape[0]", "config.KEY", *(f"hw.{name}" for name in HARDWARE_FIELDS), "hw.cpu.FEATURE")

Test = Equal | Unequal | Matches | Order


class Unknown:
    """The value of a machine's field when nothing is known of the machine."""


UNKNOWN = Unknown()


def about_machine(field: str) -> bool:
    return field.startswith("hw.")


def about_storage(field: str) -> bool:
    return field == "quant"


def about_model(field: str) -> bool:
    """Whether the field is of the model as a whole, so that a test of it takes all modules or none."""
    return field.startswith(("hw.", "config."))


def is_number(field: str) -> bool:
    return field in NUMBER_FIELDS or field.startswith("shape[") or (field.startswith("hw.") and not field.startswith("hw.cpu."))


def config_value(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key in the model's config; None where it has none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def machine_value(hardware: Hardware | None, key: str) -> Any:
    """A field of the machine. `cuda_sm` is the least of its GPUs, `vram` the sum over its accelerators, in bytes."""
    if hardware is None:
        return UNKNOWN
    if key.startswith("cpu."):
        feature = key.removeprefix("cpu.")
        return any(f == feature or f.startswith(f"{feature}_") for f in hardware.cpu_features)
    gpus = [d for d in hardware.devices if d.kind == "cuda"]
    if key == "cuda_sm":
        return UNKNOWN if any(d.sm is None for d in gpus) else min((d.sm or 0 for d in gpus), default=0)
    values = {
        "cuda_count": len(gpus),
        "vram": sum(d.memory_bytes for d in hardware.devices if d.kind != "cpu"),
        "ram": hardware.ram_bytes,
        "cores": hardware.cores,
    }
    return values[key]


def tensor_values(field: str, module: Module) -> list[Any]:
    """A field that a module's own parameters give: dtype, numel, bytes or shape[i]. Empty where it has none."""
    parameters = module.parameters
    if not parameters:
        return []
    if field == "dtype":
        return [t.dtype for t in parameters]
    if field == "numel":
        return [sum(t.numel for t in parameters)]
    if field == "bytes":
        return [sum(t.nbytes for t in parameters)]
    axis = int(field[len("shape[") : -1])
    main = next((t for t in parameters if t.name == "weight"), parameters[0])
    return [main.shape[axis]] if axis < len(main.shape) else []


def holds(test: Test, values: list[Any], pattern: Pattern | None = None) -> bool:
    """Whether any of a field's values passes the test. `!=` is the complement of `=`."""
    match test:
        case Unequal():
            return not any(same(value, test.value) for value in values)
        case Equal():
            return any(value in w if isinstance(w, Range) else same(value, w) for value in values for w in test.values)
        case Order():
            return any(test.holds(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
        case Matches():
            return pattern is not None and any(pattern.fullmatch(v) for v in values if isinstance(v, str))


def same(value: Any, written: str) -> bool:
    """Whether a value is what was written: numbers by value, true and false in any case, text as it is; any item of a list."""
    if isinstance(value, list | tuple):
        return any(same(item, written) for item in value)
    if isinstance(value, bool):
        return written.lower() == str(value).lower()
    if isinstance(value, int | float):
        try:
            return float(written) == value
        except ValueError:
            return False
    return value is not None and str(value) == written
