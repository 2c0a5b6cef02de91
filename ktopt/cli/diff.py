"""`ktopt diff A B`: what differs between two plans, each a plan file or a rule file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from ktopt.cli.options import add_force, add_model, add_target, model_argument, rules_argument, stage_options
from ktopt.cli.terminal import style_of
from ktopt.plan import Plan
from ktopt.render.style import printable


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Devices of modules that hold no tensors and that no operator takes are no difference: there is nothing to place."
    )
    parser.add_argument("before", metavar="A", help="a plan.json, or a rule file")
    parser.add_argument("after", metavar="B", help="a plan.json, or a rule file")
    add_model(parser)
    add_target(parser)
    add_force(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    from ktopt.plan_diff import diff_plans

    difference = diff_plans(_plan(args.before, args), _plan(args.after, args))
    if args.format == "json":
        print(json.dumps({**dataclasses.asdict(difference), "empty": difference.empty}, indent=2))
    elif difference.empty:
        print("the plans do not differ")
    else:
        _print(difference.render())
    return 0 if difference.empty else 1


def _plan(name: str, args: argparse.Namespace) -> Plan:
    if name.endswith(".json"):
        from ktopt.plan_check import open_plan

        return open_plan(name, args.force)
    from ktopt.compiler import compile

    return compile(rules_argument(name), model_argument(args), **stage_options(args))


def _print(text: str) -> None:
    style = style_of(sys.stdout)
    colours = {"-": "red", "+": "green", "~": "yellow"}
    for line in printable(text).splitlines():
        print(style.paint(line, colours[line[0]]) if line[:1] in colours else line)
