"""`ktopt operators [NAME]`: what rules may put in a module's place."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from typing import Any

from ktopt import registry
from ktopt.cli.table import Column, layout
from ktopt.cli.terminal import columns, style_of
from ktopt.diagnostics import UsageError
from ktopt.operator import OperatorSpec, describe_type, field_types


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="an operator's name or alias; none lists them all")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        specs = registry.specs()
        print(json.dumps([spec_json(s) for s in specs], indent=2) if args.format == "json" else _list(specs))
        return 0
    spec = registry.find(args.name)
    if spec is None:
        near = registry.suggest(args.name)
        raise UsageError(f"no operator {args.name!r}" + (f"; did you mean {near}?" if near else "; `ktopt operators` lists them"))
    print(json.dumps(spec_json(spec), indent=2) if args.format == "json" else page(spec, columns(sys.stdout)))
    return 0


def spec_json(spec: OperatorSpec) -> dict[str, Any]:
    """An operator's declaration as plain values."""
    return {
        "name": spec.name,
        "aliases": list(spec.aliases),
        "roles": list(spec.roles),
        "summary": spec.summary,
        "kwargs": [dataclasses.asdict(k) for k in kwargs_of(spec)],
        "ops": [{**dataclasses.asdict(op), "devices": list(op.devices)} for op in spec.ops.values()],
        "upstream": spec.upstream,
        "forward_changed": spec.forward_changed,
        "reason": spec.reason,
        "lost": spec.lost,
    }


@dataclasses.dataclass(frozen=True)
class Kwarg:
    """A kwarg for its page: type and default in words."""

    name: str
    type: str
    default: str
    help: str
    aliases: tuple[str, ...]
    ignored: str


def kwargs_of(spec: OperatorSpec) -> list[Kwarg]:
    config: Any = spec.config  # a frozen dataclass's class: hashable, which mypy doubts
    types = field_types(config)
    return [
        Kwarg(
            f.name,
            describe_type(types[f.name]),
            _default(f),
            *(f.metadata.get(k, d) for k, d in (("help", ""), ("aliases", ()), ("ignored", ""))),
        )
        for f in dataclasses.fields(spec.config)
    ]


def _default(f: dataclasses.Field[Any]) -> str:
    if f.default is not dataclasses.MISSING:
        return "null" if f.default is None else str(f.default).lower() if isinstance(f.default, bool) else str(f.default)
    return "required" if f.default_factory is dataclasses.MISSING else str(f.default_factory())


def _list(specs: list[OperatorSpec]) -> str:
    rows = [[s.name, ", ".join(s.roles) or "any", textwrap.shorten(s.summary, 100)] for s in specs]
    wide = max([columns(sys.stdout), 30, *(len(r[0]) for r in rows)])
    room = max(40, wide - max(len(r[0]) for r in rows) - max(len(r[1]) for r in rows) - 4)
    rows = [[name, roles, textwrap.shorten(summary, room, placeholder="...")] for name, roles, summary in rows]
    return layout((Column("operator"), Column("fits"), Column("what it does")), rows, wide, style_of(sys.stdout))


def page(spec: OperatorSpec, limit: int) -> str:
    """All that there is to know of an operator."""

    def block(text: str, indent: str = "") -> str:
        return textwrap.fill(text, min(limit, 100), initial_indent=indent, subsequent_indent=indent)

    style = style_of(sys.stdout)
    parts = [f"{style.paint(spec.name, 'bold')}\n{block(spec.summary)}", f"fits      {', '.join(spec.roles) or 'any module'}"]
    if spec.aliases:
        parts[-1] += "\nalso      " + "\n          ".join(spec.aliases)
    kwargs = kwargs_of(spec)
    if kwargs:
        lines = [style.paint("kwargs", "bold")]
        for k in kwargs:
            also = f"; also written {', '.join(k.aliases)}" if k.aliases else ""
            lines += [f"  {k.name}: {k.type} ({'required' if k.default == 'required' else 'default ' + k.default})"]
            lines.append(block((k.help or "") + also + (f". Ignored: {k.ignored}" if k.ignored else ""), "      "))
        parts.append("\n".join(lines))
    if spec.ops:
        lines = [style.paint("ops", "bold")]
        for op in spec.ops.values():
            gives = f" Gives way to {op.counterpart} where it can't run." if op.counterpart else ""
            needs = f" Not in this version: {op.needs}." if op.needs else ""
            lines += [f"  {op.name} (on {', '.join(op.devices)})", block(f"{op.help}.{gives}{needs}".replace("..", "."), "      ")]
        parts.append("\n".join(lines))
    for title, text in (("upstream", spec.upstream), ("why it only places here", spec.reason), ("lost here", spec.lost)):
        if text:
            parts.append(f"{style.paint(title, 'bold')}\n{block(text, '  ')}")
    return "\n\n".join(parts)
