"""`ktopt graph`: a plan as a picture: modules by device, and what passes between devices."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ktopt.cli.options import (
    add_context,
    add_force,
    add_model,
    add_storage,
    add_target,
    context_options,
    model_argument,
    rules_argument,
    stage_options,
    write_text,
)
from ktopt.cli.plan import asked, show_findings
from ktopt.compiler import run_stages
from ktopt.diagnostics import UsageError
from ktopt.graph import ModuleGraph
from ktopt.plan import Plan
from ktopt.render.style import printable

if TYPE_CHECKING:
    from ktopt.picture.picture import Picture
    from ktopt.working_memory.asked import Memory

FORMATS = ("dot", "json", "graphml", "svg", "html")
SUFFIXES = {".dot": "dot", ".gv": "dot", ".json": "json", ".graphml": "graphml", ".svg": "svg", ".html": "html", ".htm": "html"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rules", metavar="RULES", help="a rule file, - for standard input, a shipped set, or a plan.json")
    add_model(parser)
    add_storage(parser)
    add_target(parser)
    add_force(parser)
    add_context(parser)
    parser.add_argument(
        "--format", choices=FORMATS, help="default: what the name of -o ends in, else dot; html is a page to look at and search"
    )
    parser.add_argument("--output", "-o", metavar="FILE", default="-", help="where to write it (default: standard output)")
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
    memory = asked(plan, args, tree)
    write_text(args.output, _written(kind, plan, tree, memory, args))
    if memory is not None and args.rules.endswith(".json"):  # of a rule file it was said when it was compiled
        for _, message, help in memory.findings():
            print(printable(f"{args.rules}: KT507 error: {message}\n  help: {help}"), file=sys.stderr)
    return 1 if plan.errors or (memory is not None and memory.over) else 0


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

        context_options(args)
        plan = open_plan(args.rules, args.force)
        for error in plan.errors:
            print(error, file=sys.stderr)
        return plan, load_tree(plan.model.config) if plan.model.config.get("model_type") else None
    compilation = run_stages(rules_argument(args.rules), model_argument(args), **stage_options(args), **context_options(args))
    show_findings(compilation)
    return compilation.plan, compilation.graph


def _written(kind: str, plan: Plan, tree: ModuleGraph | None, memory: Memory | None, args: argparse.Namespace) -> str:
    from ktopt.hardware import load_hardware
    from ktopt.picture.picture import picture_of

    hardware = load_hardware(args.hardware) if args.hardware else None
    if kind == "html":
        from ktopt.picture.html import to_html

        return to_html(_in_context(picture_of(plan, tree, hardware), memory))
    return _drawn(kind, _in_context(picture_of(plan, tree, hardware, everything=args.all, unfold=args.unfold), memory))


def _in_context(picture: Picture, memory: Memory | None) -> Picture:
    """The picture with what devices hold for --context."""
    if memory is None:
        return picture
    from ktopt.picture.picture import with_context

    return with_context(picture, memory.context, {m.device: (m.cache_bytes, m.transient_bytes) for m in memory.devices})


def _drawn(kind: str, picture: Picture) -> str:
    if kind == "dot":
        from ktopt.picture.dot import to_dot

        return to_dot(picture)
    if kind == "svg":
        from ktopt.picture.svg import to_svg

        return to_svg(picture)
    from ktopt.picture.data import to_graphml, to_json

    return to_json(picture) if kind == "json" else to_graphml(picture)
