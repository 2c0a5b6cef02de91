"""Rule files, operator configs and plans as JSON Schema, for editors and other programs. `check` needs none of it.

Draft-07, the part of it that every YAML editor's plug-in reads. Operators are an `enum` with an `if`/`then` for each operator's
kwargs, never a `oneOf`, whose errors would name none of them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ktopt import registry
from ktopt.config import SECTIONS, UPSTREAMS
from ktopt.operator import OperatorConfig, OperatorSpec, field_types
from ktopt.placement import DTYPES
from ktopt.plan import FORMAT, Plan, Step

DRAFT = "http://json-schema.org/draft-07/schema#"
DEVICE_PATTERN = r"^(cpu|mps|(cuda|npu|xpu)(:\d+)?)$"
_SIMPLE: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
    Any: {},
}


def operator_schema(spec: OperatorSpec) -> dict[str, Any]:
    """The schema of one operator's kwargs, every accepted spelling of a key included."""
    return options_schema(spec.config, spec.summary, spec.ops)


def options_schema(config: type[OperatorConfig], description: str, ops: Iterable[str] = ()) -> dict[str, Any]:
    """The schema of a mapping of options; `ops` is what those take that name an inner op."""
    fields: Any = config
    hints = field_types(fields)
    properties: dict[str, Any] = {}
    required = []
    for f in dataclasses.fields(fields):
        option = _option(ops, f, hints[f.name])
        properties[f.name] = option
        for alias in f.metadata.get("aliases", ()):
            properties[alias] = {**option, "description": f"another spelling of {f.name}: {option.get('description', '')}"}
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            required.append(f.name)
    schema = {"type": "object", "description": description, "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _option(ops: Iterable[str], f: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    is_device = f.metadata.get("device") or dict[int, str] in (hint, *typing.get_args(hint))
    schema = type_schema(hint, {"type": "string", "pattern": DEVICE_PATTERN} if is_device else None)
    if f.metadata.get("op"):
        schema = {"enum": list(ops)}
    for bound in ("minimum", "maximum"):
        if f.metadata.get(bound) is not None:
            schema[bound] = f.metadata[bound]
    help = f.metadata.get("help", "")
    if f.metadata.get("ignored"):
        help += f" (has no effect: {f.metadata['ignored']})"
    if help:
        schema["description"] = help
    if f.default is not dataclasses.MISSING:
        schema["default"] = f.default
    return schema


def type_schema(hint: Any, text: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema of a Python type: what JSON makes of the values of a field annotated with it. `text` is what a string must be."""
    if hint in _SIMPLE:
        return dict(text if text and hint is str else _SIMPLE[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return _union([type_schema(part, text) for part in arguments])
    if origin is tuple:
        return _tuple(arguments)
    if origin is list:
        return {"type": "array", "items": type_schema(arguments[0], text)}
    if origin in (dict, Mapping):
        return _mapping(arguments[0], type_schema(arguments[1], text))
    if dataclasses.is_dataclass(hint) or issubclass(hint, tuple):
        return record_schema(hint)
    raise TypeError(f"no JSON Schema for {hint!r}")


def _union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Parts of different types as one schema, whose errors read better than anyOf's: each keyword concerns its own type only."""
    names = [part.get("type") for part in parts]
    if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
        return {**{key: value for part in parts for key, value in part.items()}, "type": names}
    return {"anyOf": parts}


def _tuple(arguments: tuple[Any, ...]) -> dict[str, Any]:
    if arguments[-1:] == (Ellipsis,):
        return {"type": "array", "items": type_schema(arguments[0])}
    return {"type": "array", "items": [type_schema(a) for a in arguments], "minItems": len(arguments), "maxItems": len(arguments)}


def _mapping(key: Any, values: dict[str, Any]) -> dict[str, Any]:
    """A mapping. Whole-number keys, such as layers, are digits in JSON."""
    if key is int:
        return {"type": "object", "patternProperties": {r"^\d+$": values}, "additionalProperties": False}
    return {"type": "object", "additionalProperties": values} if values else {"type": "object"}


def record_schema(record: Any) -> dict[str, Any]:
    """The schema of a dataclass or named tuple written as an object. Fields with a default may be left out."""
    hints = typing.get_type_hints(record)
    if dataclasses.is_dataclass(record):
        names = [f.name for f in dataclasses.fields(record)]
        optional = {
            f.name
            for f in dataclasses.fields(record)
            if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        }
    else:
        names, optional = list(record._fields), set(record._field_defaults)
    return {
        "type": "object",
        "properties": {name: type_schema(hints[name]) for name in names},
        "required": [name for name in names if name not in optional],
        "additionalProperties": False,
    }


def plan_schema() -> dict[str, Any]:
    """The schema of plan.json: the fields of Plan, and `format`."""
    plan = record_schema(Plan)
    plan["properties"]["steps"]["items"] = {"$ref": "#/definitions/step"}
    return {
        "$schema": DRAFT,
        "title": "ktopt plan",
        "type": "object",
        "properties": {"format": {"const": FORMAT}, **plan["properties"]},
        "required": ["format", *plan["required"]],
        "additionalProperties": False,
        "definitions": {"step": record_schema(Step)},
    }


def config_schema() -> dict[str, Any]:
    """The JSON Schema of a config.yaml: types, choices and ranges. What concerns several keys at once is told by `ktopt check`."""
    return {
        "$schema": DRAFT,
        "title": "ktopt long-context config",
        "type": "object",
        "properties": {**{name: section_schema(name) for name in SECTIONS}, **_unread("")},
        "required": ["model"],
        "additionalProperties": False,
    }


def section_schema(name: str) -> dict[str, Any]:
    """The schema of a config's section, which a native rule file may have too."""
    section = SECTIONS[name]
    schema = options_schema(section, (section.__doc__ or "").partition(": ")[2])
    return {**schema, "properties": {**schema["properties"], **_unread(name)}}


def _unread(section: str) -> dict[str, Any]:
    return {key: {"description": "KTransformers' server reads it, and nothing here does"} for key in UPSTREAMS.get(section, ())}


def ruleset_schema() -> dict[str, Any]:
    """The schema of a rule file, either form: a list of rules, or a mapping with `rules`."""
    specs = registry.specs()
    device = {"type": "string", "pattern": DEVICE_PATTERN}
    selector = {"type": "string", "minLength": 1}
    native = {
        "version": {"const": 1},
        "architectures": {
            "type": "array",
            "items": {"type": "string"},
            "description": "model classes that the file was written for",
        },
        "import": {"type": "array", "items": {"type": "string"}, "description": "other native files, relative to this one"},
        "let": {"type": "object", "propertyNames": {"pattern": r"^[A-Za-z_]\w*$"}, "additionalProperties": selector},
        "place": {
            "if": {"type": "string"},
            "then": {"const": "auto"},
            "else": {
                "type": "object",
                "properties": {"auto": {"const": "rest", "description": "what no line takes goes where it is best on the machine"}},
                "propertyNames": {"pattern": f"^auto$|{DEVICE_PATTERN}"},
                "additionalProperties": selector,
            },
            "description": "device: selector, and `auto: rest`; or `auto`, which places everything where it is best on the machine",
        },
        "rules": {"type": "array", "items": {"$ref": "#/definitions/nativeRule"}},
        "dtype": {"enum": list(DTYPES), "description": "what weights are dequantised to"},
        "default_device": device,
        "long_context": section_schema("long_context"),
        "kvc2": section_schema("kvc2"),
    }
    return {
        "$schema": DRAFT,
        "title": "ktopt rule file",
        "type": ["array", "object"],
        "if": {"type": "array"},
        "then": {"items": {"$ref": "#/definitions/listRule"}, "minItems": 1},
        "else": {"properties": native, "additionalProperties": False},
        "definitions": {
            "match": _match(),
            "operator": {"enum": [name for spec in specs for name in (spec.name, *spec.aliases)]},
            "replace": _replace(specs),
            "listRule": _list_rule(),
            "nativeRule": _native_rule(specs, selector),
            "kwargs": {spec.name: operator_schema(spec) for spec in specs},
        },
    }


def _match() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "format": "regex", "description": "a regex, searched in the module's path"},
            "class": {"type": "string", "description": "the module is an instance of this class"},
        },
        "additionalProperties": False,
        "minProperties": 1,
    }


def _replace(specs: Iterable[OperatorSpec]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"class": {"$ref": "#/definitions/operator"}, "kwargs": {"type": "object"}},
        "additionalProperties": False,
        "allOf": _kwargs_of("class", specs),
    }


def _kwargs_of(key: str, specs: Iterable[OperatorSpec]) -> list[dict[str, Any]]:
    """For each operator: where `key` names it, `kwargs` are its own."""
    return [
        {
            "if": {"properties": {key: {"enum": [spec.name, *spec.aliases]}}, "required": [key]},
            "then": {"properties": {"kwargs": {"$ref": f"#/definitions/kwargs/{spec.name}"}}},
        }
        for spec in specs
    ]


def _list_rule() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "match": {"$ref": "#/definitions/match"},
            "replace": {"$ref": "#/definitions/replace"},
            "recursive": {"type": "boolean", "default": True, "description": "false keeps later rules out of what is inside"},
        },
        "required": ["match", "replace"],
        "additionalProperties": False,
    }


def _native_rule(specs: Iterable[OperatorSpec], selector: dict[str, Any]) -> dict[str, Any]:
    def text_or(other: str) -> dict[str, Any]:
        return {"type": ["string", "object"], "if": {"type": "object"}, "then": {"$ref": other}}

    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "match": text_or("#/definitions/match"),
            "replace": {**text_or("#/definitions/replace"), "else": {"$ref": "#/definitions/operator"}},
            "kwargs": {"type": "object"},
            "when": {**selector, "description": "a condition on the machine, such as hw.cuda_sm >= 80"},
            "expect": {"type": "integer", "minimum": 0, "description": "how many modules the rule must take"},
            "recursive": {"type": "boolean", "default": True, "description": "false keeps later rules out of what is inside"},
        },
        "required": ["match", "replace"],
        "additionalProperties": False,
        "allOf": _kwargs_of("replace", specs),
    }
