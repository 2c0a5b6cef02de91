"""Reading a long-context config file (config.yaml): a Config, or findings with place and remedy for everything that can't be.

Findings are KT2's, as for rule files: KT202 unknown key, KT203 missing, KT206 wrong kind, KT207 unknown word, KT210 a setting that
can't be, KT211 one that is rounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Mapping as Map
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ktopt.config import GROUP, QUANTISED, SECTIONS, CacheSettings, Config, LongContextSettings, anchors_of
from ktopt.diagnostics import CompileError, Report
from ktopt.operator import OperatorConfig, describe_type, field_types, is_a, nearest, option_names
from ktopt.parse import parse, read_source
from ktopt.source import Document, Mapping, Node, Scalar, SourceFile, plain
from ktopt.validate.replacement import read_device
from ktopt.validate.shape import Shape, kind_of

_OF_RULES = ("rules", "version", "place", "let", "import", "architectures")
_SECTION = re.compile(r"(?m)^[\"']?(?:model|long_context|kvc2)[\"']?[ \t]*:")
SERVER = ("log", "server", "db", "user", "ext", "web", "attn", "local_store", "fast_safetensors", "local_chat")
"""Sections of KTransformers' own config.yaml for its server and its command line."""


def read_config(path: str | Path) -> Config:
    """The config in a file. CompileError, whose report has every finding, where it can't be used; lengths are rounded up to whole
    blocks without a word (`check_config` tells)."""
    source = read_source(path)
    report = Report()
    document = parse(source, report)
    config = check_config(document, report)
    if config is None or report.errors:
        raise CompileError(report)
    return config


def may_be_config(source: SourceFile) -> bool:
    """Whether a text may be a config file, by a look at it."""
    return _SECTION.search(source.text) is not None


def is_config(document: Document) -> bool:
    """Whether a parsed file is a config and no rule file: it has a section of one, and no key that only a rule file has."""
    root = document.root
    if not isinstance(root, Mapping):
        return False
    keys = {key.value for key, _ in root}
    return bool(keys & SECTIONS.keys()) and not keys & set(_OF_RULES)


def check_config(document: Document, report: Report) -> Config | None:
    """The config of a parsed file, and findings for everything in it that can't be or isn't as written. None with an error."""
    shape = Shape(document.source.path, report)
    root = document.root
    before = len(report.errors)
    if not isinstance(root, Mapping):
        if root is not None:
            shape.error("KT206", f"a config is a mapping with `model`, not {kind_of(root)}", root, help="write `model:` ...")
        return None
    elsewhere = dict.fromkeys(
        SERVER, "KTransformers' server and command line read it; ktopt's config has model, long_context, kvc2"
    )
    shape.keys(root, tuple(SECTIONS), {**elsewhere, **_owners()})
    if root.get("model") is None:
        shape.error(
            "KT203", "`model` is missing", root.entries[0][0] if root.entries else root, help="write `model:`, with `name_or_path`"
        )
    made: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        node = root.get(name)
        section = shape.mapping(node, name, "its keys") if node is not None else None
        if section is not None:
            made[name] = _Section(shape.inside(name), cls, section).read()
    if len(report.errors) > before or made.get("model") is None:
        return None
    config = Config(made["model"], made.get("long_context") or LongContextSettings(), made.get("kvc2") or CacheSettings())
    settled = _settle(config, shape.inside("long_context"), root)
    return None if len(report.errors) > before else settled


def _owners() -> dict[str, str]:
    """Where a key of a section belongs that stands beside the sections."""
    return {key: f"it belongs under `{name}:`" for name, cls in SECTIONS.items() for key in _names(cls)}


def _names(cls: Any) -> dict[str, str]:
    """Every spelling of a section's keys, to the field's name."""
    return option_names(cls)


class _Section:
    """Reads one section's keys into its class."""

    def __init__(self, shape: Shape, cls: type[OperatorConfig], section: Mapping) -> None:
        self.shape, self.cls, self.section = shape, cls, section
        fields_of: Any = cls
        self.names, self.hints = _names(cls), field_types(fields_of)
        self.metadata: dict[str, Map[str, Any]] = {f.name: f.metadata for f in fields(cls)}

    def read(self) -> OperatorConfig | None:
        before = len(self.shape.report.errors)
        others = {key: text for key, text in _owners().items() if key not in self.names}
        self.shape.keys(self.section, tuple(self.names), others)
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
        return None if len(self.shape.report.errors) > before else self.cls(**values)

    def value(self, name: str, key: str, node: Node) -> Any:
        value, hint, meta = plain(node), self.hints[name], self.metadata[name]
        if not is_a(value, hint):
            self.wrong_kind(key, node, value, hint)
        elif meta.get("device") and isinstance(node, Scalar) and value is not None:
            return read_device(self.shape.inside(key), node)
        elif isinstance(value, int | float) and (wrong := _outside(value, meta)):
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


def _outside(value: float, meta: Map[str, Any]) -> str:
    """What a number must be that isn't in its range, "" where it is."""
    least, most = meta.get("minimum"), meta.get("maximum")
    if (least is not None and value < least) or (most is not None and value > most) or value != value:
        return f"from {least} to {most}" if most is not None else f"at least {least}"
    return ""


def _settle(config: Config, shape: Shape, root: Mapping) -> Config:
    """The config with lengths in whole blocks and defaults that hang on other keys; findings where keys don't go together."""
    section = root.get("long_context")

    def at(*names: str) -> Node:
        """Where the first of these keys stands that is written; else the section's or the file's first key."""
        written = section if isinstance(section, Mapping) else root
        spelled = {key.value: node for key, node in written}
        return next((spelled[n] for n in names if n in spelled), written.entries[0][0])

    long = config.long_context
    block = long.block_size
    rounded = {}
    for name in ("max_seq_len", "local_windows_len"):
        length = getattr(long, name)
        rounded[name] = -(-length // block) * block
        if rounded[name] != length and isinstance(section, Mapping) and (section.get(name) or section.get("block_size")):
            message = f"`{name}: {length}` is rounded up to {rounded[name]}, {rounded[name] // block} blocks of {block} tokens"
            shape.info("KT211", message, at(name, "block_size"))
    wanted = anchors_of(long.anchor_type)
    anchors = long.anchor_num or wanted or 1
    if wanted is not None and anchors != wanted:
        message = f"`anchor_type: {long.anchor_type}` needs `anchor_num: {wanted}`, not {anchors}"
        shape.error("KT210", message, at("anchor_num", "representative_num"), help=f"write {wanted}, or delete the key")
    elif anchors > block:
        message = f"a block of {block} tokens has no {anchors} keys to stand for it"
        shape.error("KT210", message, at("anchor_num", "representative_num"), help="make `anchor_num` smaller, or blocks larger")
    if long.kv_type in QUANTISED and block % GROUP:
        message = f"`kv_type: {long.kv_type}` needs a `block_size` that is a multiple of {GROUP}, not {block}"
        shape.error(
            "KT210",
            message,
            at("block_size", "kv_type"),
            help=f"write {-(-block // GROUP) * GROUP}, or a `kv_type` that isn't quantised",
        )
    chosen = 1 + rounded["local_windows_len"] // block + (long.preselect_block_count if long.preselect_block else 0)
    capacity = rounded["max_seq_len"] // block
    if chosen > capacity:
        parts = f"the first block, {rounded['local_windows_len'] // block} of the local window"
        parts += f" and {long.preselect_block_count} that are preselected" if long.preselect_block else ""
        message = f"{parts} are {chosen} blocks, and the cache holds {capacity} (`max_seq_len` of {rounded['max_seq_len']} tokens)"
        where = at("preselect_block_count" if long.preselect_block else "local_windows_len", "local_windows_len", "max_seq_len")
        shape.error("KT210", message, where, help="make `max_seq_len` larger, or the window and the choice smaller")
    return replace(config, long_context=replace(long, **rounded, anchor_num=anchors, token_step=long.token_step or 1))
