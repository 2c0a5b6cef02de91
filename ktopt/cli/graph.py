"""`ktopt graph`: a plan as a picture: modules by device, and what passes between devices."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ktopt.cli.options import add_force, add_model, add_target, model_argument, rules_argument, stage_options, write_text
from ktopt.cli.plan import show_findings
from ktopt.compiler import run_stages
from ktopt.diagnostics import UsageError
from ktopt.graph import ModuleGraph
from ktopt.plan import Plan

if TYPE_CHECKING:
    from ktopt.picture.picture import Picture

FORMATS = ("dot", "json", "graphml", "svg", "html")
SUFFIXES = {".dot": "dot", ".gv": "dot", ".json": "json", ".graphml": "graphml", ".svg": "svg", ".html": "html", ".htm": "html"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rules", metavar="RULES", help="a rule file, - for standard input, a shipped set, or a plan.json")
    add_model(parser)
    add_target(parser)
    add_force(parser)
    parser.add_argument(
        "--format", choices=FORMATS, help="default: what the name of -o ends in, else dot; html is a page to look at and search"
    )
    parser.add_argument("--output", "-o", metavar="FILE", default="-", help="where to write it (default: standard output)")
    parser.add_argument("--context", type=int, metavar="N", help="show too what a context of N tokens takes beside the weights")
    parser.add_argument(
        "--unfold", action="store_true", help="each module by itself, instead of alike ones as one (a page has both anyway)"
    )
    parser.add_argument(
        "--all", action="store_true", help="with modules that have neither weights nor a rule, and those inside closed ones"
    )


def run(args: argparse.Namespace) -> int:
    kind = args.format or _guessed(args.output)
    plan, tree = _plan(args)
    if plan is None:
        return 1
    write_text(args.output, _written(kind, plan, tree, args))
    return 1 if plan.errors else 0


def _guessed(output: str) -> str:
    """The format that a file's name ends in; dot for standard output."""
    if output == "-":
        return "dot"
    suffix = Path(output).suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            f"{output}: which format? Give --format {', '.join(FORMATS)}, or a name that ends in {', '.join(SUFFIXES)}"
        )
    return SUFFIXES[suffix]


def _plan(args: argparse.Namespace) -> tuple[Plan | None, ModuleGraph | None]:
    """The plan and its model's tree, with its errors on stderr; None where rules can't be compiled."""
    if args.rules.endswith(".json"):
        from ktopt.plan_check import open_plan
        from ktopt.trees import load_tree

        plan = open_plan(args.rules, args.force)
        for error in plan.errors:
            print(error, file=sys.stderr)
        return plan, load_tree(plan.model.config) if plan.model.config.get("model_type") else None
    compilation = run_stages(rules_argument(args.rules), model_argument(args), **stage_options(args))
    show_findings(compilation)
    return compilation.plan, compilation.graph


def _written(kind: str, plan: Plan, tree: ModuleGraph | None, args: argparse.Namespace) -> str:
    from ktopt.hardware import load_hardware
    from ktopt.picture.picture import picture_of

    hardware = load_hardware(args.hardware) if args.hardware else None
    if kind == "html":
        from ktopt.picture.html import to_html

        return to_html(_in_context(picture_of(plan, tree, hardware), args.context))
    return _drawn(kind, _in_context(picture_of(plan, tree, hardware, everything=args.all, unfold=args.unfold), args.context))


def _in_context(picture: Picture, context: int | None) -> Picture:
    """The picture with what devices hold for --context."""
    if context is None:
        return picture
    if context < 1:
        raise UsageError(f"--context: a number of tokens from 1 on, not {context}")
    from ktopt.picture.picture import with_context
    from ktopt.working_memory import working_memory

    limits = {device.name: device.memory_bytes for device in picture.devices}
    memory = working_memory(picture.plan, context, limits=limits)
    return with_context(picture, context, {m.device: (m.cache_bytes, m.transient_bytes) for m in memory})


def _drawn(kind: str, picture: Picture) -> str:
    if kind == "dot":
        from ktopt.picture.dot import to_dot

        return to_dot(picture)
    if kind == "svg":
        from ktopt.picture.svg import to_svg

        return to_svg(picture)
    from ktopt.picture.data import to_graphml, to_json

    return to_json(picture) if kind == "json" else to_graphml(picture)
