"""Operators, their kwargs and ops as Markdown, and the values that a kwarg can have."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from ktopt import registry
from ktopt.config import SECTIONS
from ktopt.operator import Op, OperatorSpec, describe_type, field_types, option_names


def sentence(text: str) -> str:
    return text and text[0].upper() + text[1:] + ("" if text.endswith((".", ":", "!", "?")) else ".")


@cache
def specs() -> tuple[OperatorSpec, ...]:
    """Every operator; `default` first."""
    return tuple(sorted(registry.specs(), key=lambda spec: (spec.name != "default", spec.name.lower())))


def operator_page(spec: OperatorSpec) -> str:
    """All that there is to know of an operator."""
    facts = (("Replaces", ", ".join(spec.roles) or "any module"), ("In KTransformers", spec.upstream), ("Lost here", spec.lost))
    parts = [f"**{spec.name}**", sentence(spec.summary), "\n".join(f"- {name}: {text}" for name, text in facts if text)]
    options = [f"- `{name}`: {text}" for name, text in _options(spec.config)]
    if options:
        parts.append("**kwargs**\n\n" + "\n".join(options))
    if spec.ops:
        parts.append(
            "**ops**\n\n" + "\n".join(f"- `{op.name}` ({', '.join(op.devices)}): {op_help(op)}" for op in spec.ops.values())
        )
    return "\n\n".join(parts)


def op_help(op: Op) -> str:
    """What an op is, and whether it can be had."""
    here = f" Not in this version: {op.needs}; {op.counterpart} runs instead." if op.needs else ""
    return sentence(op.help) + here


def op_page(op: Op) -> str:
    return f"**{op.name}**, an op that runs on {' or '.join(op.devices)}\n\n{op_help(op)}"


def option_page(spec: OperatorSpec, name: str) -> str:
    """A kwarg's page, by any of its spellings."""
    field = option_field(spec, name)
    assert field is not None
    return _page(field.name, spec.name, dict(_options(spec.config))[field.name], option_values(spec, name))


def _page(name: str, owner: str, text: str, values: list[str]) -> str:
    listed = ", ".join(f"`{value}`" for value in values if value != "null")
    return f"**{name}** of {owner}\n\n{text}" + (f"\n\nOne of {listed}" if listed else "")


def setting_page(section: str, name: str) -> str:
    """The page of a setting of `long_context` or `kvc2`, by any of its spellings; "" where there is no such."""
    config: Any = SECTIONS[section]
    known = option_names(config).get(name)
    return _page(known, section, dict(_options(config))[known], setting_values(section, name)) if known else ""


def setting_type(section: str, name: str) -> str:
    """What a setting takes, in a few words."""
    config: Any = SECTIONS[section]
    return describe_type(field_types(config)[name])


def setting_values(section: str, name: str) -> list[str]:
    """The values that a setting can have, as option_values."""
    config: Any = SECTIONS[section]
    known = option_names(config).get(name)
    return list(dict.fromkeys(_values(field_types(config)[known]))) if known else []


def option_type(spec: OperatorSpec, name: str) -> str:
    """What a kwarg takes, in a few words."""
    field = option_field(spec, name)
    config: Any = spec.config
    if field is None:
        return ""
    return f"an op of {spec.name}" if field.metadata.get("op") else describe_type(field_types(config)[field.name])


def _options(config: Any) -> Iterator[tuple[str, str]]:
    """Each option, and what there is to say of it."""
    for field in dataclasses.fields(config):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = "required" if required else f"default `{json.dumps(field.default)}`"
        text = f"{describe_type(field_types(config)[field.name])}, {default}. {sentence(field.metadata.get('help', ''))}"
        if field.metadata.get("ignored"):
            text += f" Has no effect: {field.metadata['ignored']}."
        if aliases := field.metadata.get("aliases"):
            text += f" Also written {', '.join(aliases)}."
        yield field.name, text


def option_field(spec: OperatorSpec, name: str) -> dataclasses.Field[Any] | None:
    """A kwarg's field, by any of its spellings; None where the operator has no such kwarg."""
    config: Any = spec.config
    known = option_names(config).get(name)
    return next((f for f in dataclasses.fields(config) if f.name == known), None)


def is_device(spec: OperatorSpec, name: str) -> bool:
    field = option_field(spec, name)
    return field is not None and bool(field.metadata.get("device"))


def option_values(spec: OperatorSpec, name: str) -> list[str]:
    """The values that a kwarg can have, as YAML writes them; empty where they can't be listed, as devices can't."""
    field = option_field(spec, name)
    if field is None:
        return []
    if field.metadata.get("op"):
        return list(spec.ops)
    config: Any = spec.config
    return list(dict.fromkeys(_values(field_types(config)[field.name])))


def _values(hint: Any) -> Iterator[str]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from _values(part)
    elif origin is Literal:
        yield from (json.dumps(value) if not isinstance(value, str) else value for value in typing.get_args(hint))
    elif hint is bool:
        yield from ("true", "false")
    elif hint is type(None):
        yield "null"
