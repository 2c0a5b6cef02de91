"""`ktopt why MODULE RULES`: the rule that decided a module, why the others didn't, and where each kwarg came from."""

from __future__ import annotations

import argparse
import json
import sys

from ktopt.cli.findings import at_least, print_report
from ktopt.cli.options import add_model, add_storage, add_target, model_argument, rules_argument, stage_options
from ktopt.compiler import run_stages
from ktopt.diagnostics import Severity
from ktopt.why import Explanation, explain_module


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "module", metavar="MODULE", help="a module's path, today's or KTransformers', or a pattern of several: the first is told"
    )
    parser.add_argument("rules", metavar="RULES", help="the rule file that is asked about; MODULE alone is not enough")
    add_model(parser)
    add_storage(parser)
    add_target(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    c = run_stages(rules_argument(args.rules), model_argument(args), **stage_options(args))
    if c.ruleset is None or c.graph is None or c.matches is None or c.plan is None:
        print_report(at_least(c.report.sorted(), Severity.ERROR), sys.stderr, c.document.sources)
        return 1
    found = explain_module(args.module, c.ruleset, c.graph, c.matches, c.plan)
    print(
        json.dumps(to_json(found), indent=2) if args.format == "json" else found.render(), end="\n" if args.format == "json" else ""
    )
    return 0


def to_json(e: Explanation) -> dict[str, object]:
    """The explanation as plain values."""
    return {
        "path": e.path,
        "asked": e.asked,
        "class": e.cls,
        "rule": {"number": e.rule.number, "id": e.rule.id, "at": str(e.rule.origin)} if e.rule else None,
        "clauses": [{"key": c.key, "text": c.text, "at": str(c.origin)} for c in e.clauses],
        "alias": e.alias,
        "closed_by": e.closed_by,
        "operator": e.operator,
        "generate_device": e.generate_device,
        "prefill_device": e.prefill_device,
        "replicas": list(e.replicas),
        "weight_bytes": e.weight_bytes,
        "kwargs": [{"name": k.name, "value": k.value, "source": k.source} for k in e.kwargs],
        "lost": [{"number": x.number, "id": x.id, "at": str(x.origin), "clause": x.clause, "reason": x.reason} for x in e.lost],
        "notes": list(e.notes),
        "of": e.of,
        "otherwise": list(e.otherwise),
    }
