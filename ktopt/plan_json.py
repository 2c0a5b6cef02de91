"""A plan as JSON and back: plan.json, and the lock file, which is the same without versions.

One module a line, so that plans diff well under any tool. Empty optional fields are left out. A plan file may come from a stranger:
every field is checked before it is used, and nothing in it is executed.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ktopt.config import settings_problem
from ktopt.diagnostics import KtoptError
from ktopt.operator import describe_type
from ktopt.placement import canonical_device
from ktopt.plan import FORMAT, ModelRef, Plan, RuleRef, Step, Transfer

SECTIONS = ("long_context", "kvc2")
"""Fields that are left out where they are empty."""
VERSION_FIELDS = ("ktopt_version", "transformers_version")
MAX_PLAN_BYTES = 512 << 20
_WHOLE_NUMBER = re.compile("0|[1-9][0-9]{0,9}")


class PlanFileError(KtoptError):
    """A plan file that can't be read as one."""


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values, in a fixed order."""
    values = {f.name: _plain(getattr(plan, f.name)) for f in fields(Plan)}
    return {"format": FORMAT, **{name: value for name, value in values.items() if value or name not in SECTIONS}}


def _plain(value: Any) -> Any:
    if isinstance(value, Step):
        return {name: _plain(v) for name, v in zip(Step._fields, value, strict=True) if _worth_writing(name, v)}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _worth_writing(name: str, value: Any) -> bool:
    return name not in Step._field_defaults or value != Step._field_defaults[name]


def dump_plan(plan: Plan) -> str:
    """plan.json: an object whose `steps` stand one a line."""
    return _dump(plan_to_json(plan))


def dump_lock(plan: Plan) -> str:
    """The lock file: the resolved plan without the versions that made it and without where files lay."""
    data = plan_to_json(plan)
    for name in VERSION_FIELDS:
        del data[name]
    return _dump(data)


def _dump(data: dict[str, Any]) -> str:
    parts = []
    for key, value in data.items():
        if key in ("steps", "transfers", "rules") and value:
            rows = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in value)
            parts.append(f"  {json.dumps(key)}: [\n    {rows}\n  ]")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def load_plan(path: str | Path) -> Plan:
    """Read a plan file. PlanFileError names the file and the field that is wrong."""
    return plan_from_json(read_plan_json(path), str(path))


def read_plan_json(path: str | Path) -> dict[str, Any]:
    """The JSON object of a plan or lock file, unchecked but for its being one."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise PlanFileError(f"{path}: larger than {MAX_PLAN_BYTES >> 20} MB; that is no plan")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanFileError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or "steps" not in data:
        raise PlanFileError(f"{path}: not a plan; `ktopt plan RULES --model M -o plan.json` writes one")
    return data


def plan_from_json(data: Mapping[str, Any], where: str = "plan") -> Plan:
    """A Plan from the values of plan_to_json."""
    data = dict(data)
    found = data.pop("format", None)
    if found != FORMAT:
        raise PlanFileError(
            f"{where}: plan format {_shown(found)}; this ktopt reads format {FORMAT}. Make the plan again with `ktopt plan`"
        )
    try:
        plan: Plan = _read(Plan, data, where)
    except RecursionError:
        raise PlanFileError(f"{where}: nested too deeply to be a plan") from None
    _check_plan(plan, where)
    return plan


@cache
def _types(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Field types of a plan class, and which fields must be present."""
    hints = typing.get_type_hints(kind)
    if kind is Step:
        return {name: hints[name] for name in Step._fields}, frozenset(Step._fields) - set(Step._field_defaults)
    optional = {f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING}
    if kind is ModelRef:
        optional.discard("config_digest")  # computed for a plan that is made, and never for one that is read
    return {f.name: hints[f.name] for f in fields(kind)}, frozenset(hints) - optional


def _read(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise PlanFileError(f"{where}: must be an object, not {_shown(data)}")
    hints, required = _types(kind)
    unknown = [key for key in data if key not in hints]
    if unknown:
        raise PlanFileError(f"{where}: unknown field {unknown[0]!r}")
    missing = sorted(required - set(data))
    if missing:
        raise PlanFileError(f"{where}: the field {missing[0]!r} is missing")
    return kind(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in data.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (ModelRef, RuleRef, Step, Transfer):
        return _read(hint, value, where)
    if origin in (typing.Union, types.UnionType):
        return None if value is None and type(None) in args else _value(args[0], value, where)
    if origin is tuple and isinstance(value, list):
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_value(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        if len(args) == len(value):
            return tuple(_value(a, v, where) for a, v in zip(args, value, strict=True))
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return _free(value, where) if args[1] is Any else {k: _value(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise PlanFileError(f"{where}: must be {_in_words(hint)}, not {_shown(value)}")


def _in_words(hint: Any) -> str:
    """A field's type as JSON has it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_in_words, args))
    if origin is tuple:
        return "a list" if len(args) == 2 and args[1] is Ellipsis else f"a list of {len(args)}"
    return "an object" if origin is not None and issubclass(origin, Mapping) else describe_type(hint)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _free(value: Any, where: str) -> Any:
    """Values of any shape (kwargs, a model's config), with the whole-number keys that JSON made strings."""
    if isinstance(value, Mapping):
        return {int(k) if _WHOLE_NUMBER.fullmatch(str(k)) else k: _free(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanFileError(f"{where}: {value} is no number to compute with")
    return value


def _check_plan(plan: Plan, where: str) -> None:
    for name in SECTIONS:
        if problem := settings_problem(name, getattr(plan, name)):
            raise PlanFileError(f"{where}: {name}: {problem}")
    _check_devices((plan.default_device,), f"{where}: default_device")
    for step in plan.steps:
        _check_devices((step.generate_device, step.prefill_device, *step.replicas), f"{where}: {step.path}")
        if step.weight_bytes < 0:
            raise PlanFileError(f"{where}: {step.path}: weight_bytes {step.weight_bytes} is less than nothing")
        _check_devices(step.elsewhere, f"{where}: {step.path}: elsewhere")
        if any(count < 0 for count in step.elsewhere.values()) or sum(step.elsewhere.values()) > step.weight_bytes:
            raise PlanFileError(f"{where}: {step.path}: elsewhere isn't a part of its weight_bytes {step.weight_bytes}")
        if step.rule is not None and not 0 <= step.rule < len(plan.rules):
            raise PlanFileError(f"{where}: {step.path}: rule {step.rule} of {len(plan.rules)}")
    for transfer in plan.transfers:
        _check_devices((transfer.source, transfer.target), f"{where}: transfer at {transfer.path}")
        if transfer.side not in ("input", "output"):
            raise PlanFileError(f"{where}: transfer at {transfer.path}: side {transfer.side!r} is neither input nor output")


def _check_devices(devices: Iterable[str], where: str) -> None:
    for device in devices:
        try:
            canonical = canonical_device(device)
        except ValueError as error:
            raise PlanFileError(f"{where}: {error}") from error
        if canonical != device:
            raise PlanFileError(f"{where}: {device!r} is not the canonical spelling of a device, {canonical!r}")
