"""`ktopt diff A B`: what differs between two plans, each a plan file or a rule file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from ktopt.cli.options import add_force, add_model, add_storage, add_target, model_argument, rules_argument, stage_options
from ktopt.cli.terminal import columns, style_of
from ktopt.plan import Plan

if TYPE_CHECKING:
    from ktopt.plan_diff import Field, PlanDiff, RuleChanges


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what differs between two plans, by rule and by group of modules. Devices of modules that hold no tensors and that no "
        "operator takes are no difference: there is nothing to place."
    )
    parser.add_argument("before", metavar="A", help="a plan.json, or a rule file")
    parser.add_argument("after", metavar="B", help="a plan.json, or a rule file")
    add_model(parser)
    add_storage(parser)
    add_target(parser)
    add_force(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    from ktopt.cli.diff_text import diff_text
    from ktopt.plan_diff import diff_plans

    a, b = _plan(args.before, args), _plan(args.after, args)
    difference = diff_plans(a, b)
    if args.format == "json":
        print(json.dumps(to_json(difference), indent=2))
    else:
        sys.stdout.write(diff_text(difference, a, b, columns(sys.stdout), style_of(sys.stdout)))
    return 0 if difference.empty else 1


def _plan(name: str, args: argparse.Namespace) -> Plan:
    if name.endswith(".json"):
        from ktopt.plan_check import open_plan

        return open_plan(name, args.force)
    from ktopt.compiler import compile

    return compile(rules_argument(name), model_argument(args), **stage_options(args))


def to_json(difference: PlanDiff) -> dict[str, Any]:
    """The difference as plain values."""
    return {
        "empty": difference.empty,
        "devices": [{"device": d, "before": before, "after": after} for d, before, after in difference.devices],
        "rules": [_rule_json(rule) for rule in difference.rules],
        "only_before": list(difference.only_a),
        "only_after": list(difference.only_b),
        "transfers": [dataclasses.asdict(transfer) for transfer in difference.transfers],
        "settings": [_field_json(setting) for setting in difference.settings],
    }


def _rule_json(rule: RuleChanges) -> dict[str, Any]:
    return {
        **{side: ref and dataclasses.asdict(ref) for side, ref in (("before", rule.before), ("after", rule.after))},
        "same": rule.same,
        "changes": [
            {
                "modules": change.modules,
                "paths": list(change.paths),
                "fields": [_field_json(field) for field in change.fields],
                "bytes": change.nbytes,
            }
            for change in rule.changes
        ],
    }


def _field_json(field: Field) -> dict[str, Any]:
    from ktopt.plan_diff import as_json

    return {"field": field.name, "before": as_json(field.before), "after": as_json(field.after)}
