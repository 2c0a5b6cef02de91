"""Sections of settings, `long_context` and `kvc2` of a config or a native rule file: YAML nodes to typed values, with findings.

KT202 unknown key, KT203 missing, KT206 wrong kind, KT207 unknown word, KT210 a setting that can't be, KT211 one that is rounded,
KT212 what nothing here reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Mapping as Map
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin

from ktopt.config import LENGTHS, SECTIONS, UPSTREAMS, LongContextSettings, contradictions, outside, settle
from ktopt.operator import OperatorConfig, describe_type, field_types, is_a, nearest, option_names
from ktopt.source import Mapping, Node, Scalar, plain
from ktopt.validate.replacement import read_device
from ktopt.validate.shape import Shape, kind_of


def owners() -> dict[str, str]:
    """Where a key of a section belongs that stands beside the sections."""
    return {key: f"it belongs under `{name}:`" for name, cls in SECTIONS.items() for key in _names(cls)}


def _names(cls: Any) -> dict[str, str]:
    """Every spelling of a section's keys, to the field's name."""
    return option_names(cls)


def say_unread(shape: Shape, mapping: Mapping, section: str) -> None:
    """KT212 for what a section, or the whole file (""), has of KTransformers' that nothing here reads."""
    if unread := [key for key, _ in mapping if key.value in UPSTREAMS.get(section, ())]:
        names = ", ".join(f"`{key.value}`" for key in unread)
        shape.info("KT212", f"{names}: KTransformers' server reads that, and nothing here does", unread[0])


class SectionReader:
    """Reads the keys of the section called `name`."""

    def __init__(self, shape: Shape, name: str, section: Mapping) -> None:
        self.shape, self.section, self.unread = shape.inside(name), section, UPSTREAMS.get(name, ())
        say_unread(self.shape, section, name)
        self.cls: type[OperatorConfig] = SECTIONS[name]
        fields_of: Any = self.cls
        self.names, self.hints = _names(self.cls), field_types(fields_of)
        self.metadata: dict[str, Map[str, Any]] = {f.name: f.metadata for f in fields(self.cls)}

    def read(self) -> dict[str, Any] | None:
        """The values that are written, by the fields' names; None where one can't be, or one that there must be is missing."""
        before = len(self.shape.report.errors)
        others = {key: text for key, text in owners().items() if key not in self.names}
        self.shape.keys(self.section, (*self.names, *self.unread), others)
        values: dict[str, Any] = {}
        for key, node in self.section:
            name = self.names.get(str(key.value))
            if name in values:
                self.shape.error(
                    "KT210", f"`{key.value}` is another spelling of `{name}`, which is given too", key, help="keep one"
                )
            elif name is not None:
                values[name] = self.value(name, str(key.value), node)
        for f in fields(self.cls):
            if f.default is MISSING and f.name not in values:
                at = self.section.entries[0][0] if self.section.entries else self.section
                self.shape.error("KT203", f"`{f.name}` is missing", at, help=f"write `{f.name}:`, {f.metadata['help']}")
        return None if len(self.shape.report.errors) > before else values

    def value(self, name: str, key: str, node: Node) -> Any:
        value, hint, meta = plain(node), self.hints[name], self.metadata[name]
        if not is_a(value, hint):
            self.wrong_kind(key, node, value, hint)
        elif meta.get("device") and isinstance(node, Scalar) and value is not None:
            return read_device(self.shape.inside(key), node)
        elif wrong := outside(value, meta):
            self.shape.error("KT210", f"`{key}` must be {wrong}, not {value}", node, help=f"it is: {meta['help']}")
        return value

    def wrong_kind(self, key: str, node: Node, value: Any, hint: Any) -> None:
        words = list(_choices(hint))
        if words and isinstance(value, str):
            near = next((w for w in words if w == value.upper() or w == value.lower()), "") or nearest(value.upper(), words)
            message = f'`{key}` is "{value}"' + (f"; did you mean {near}?" if near else "")
            fix = self.shape.rewrite(f"write {near}", node, near, safe=False) if near else None
            self.shape.error("KT207", message, node, help=f"it is one of {', '.join(words)}", fix=fix)
            return
        if isinstance(node, Scalar) and value is None:
            self.shape.error("KT205", f"`{key}` is empty", node, help="write a value, or delete the key")
            return
        self.shape.error(
            "KT206",
            f"`{key}` must be {describe_type(hint)}, not {kind_of(node)}",
            node,
            help=self.metadata[self.names[key]]["help"],
        )


def _choices(hint: Any) -> Iterable[str]:
    """The words that a hint allows, if it allows only words."""
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Literal:
            yield from get_args(part)


def check_together(
    shape: Shape, section: Mapping, long: LongContextSettings, written: Collection[str], *, whole: bool = True
) -> LongContextSettings:
    """`long` settled, with findings where keys don't go together, and where a length is rounded.

    shape, section   the section's shape, and where its keys stand (of a config that has no such section, the whole file)
    whole            nothing else settles what isn't written; otherwise only what is certain is said
    """
    names = _names(LongContextSettings)
    spelled = {names[str(key.value)]: node for key, node in section if key.value in names}

    def at(*wanted: str) -> Node:
        """Where the first of these keys stands that is written; else the first key."""
        return next((spelled[name] for name in wanted if name in spelled), section.entries[0][0])

    settled = settle(long)
    for name in LENGTHS:
        length, rounded = getattr(long, name), getattr(settled, name)
        if rounded != length and (name in written or (whole and "block_size" in written)):
            message = (
                f"`{name}: {length}` is rounded up to {rounded}, {rounded // long.block_size} blocks of {long.block_size} tokens"
            )
            shape.info("KT211", message, at(name, "block_size"))
    for found in contradictions(settled):
        if whole or set(found.sure) <= set(written):
            shape.error("KT210", found.message, at(*found.keys), help=found.help)
    return settled
