"""`ktopt place`: where modules go on a machine, for the least time of a decoded token, as a `place:` map."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktopt.authoring.hot_experts import with_hot_experts
from ktopt.authoring.placing import with_places
from ktopt.cli.findings import print_report
from ktopt.cli.options import add_model, add_storage, add_target, compile_options, model_argument, rules_argument, write_text
from ktopt.cli.table import Column, layout
from ktopt.cli.terminal import size, style_of
from ktopt.compiler import run_stages
from ktopt.diagnostics import KtoptError, Report, UsageError
from ktopt.parse import parse
from ktopt.placement import Hardware
from ktopt.placing.place import DEFAULT_CONTEXT, Placing, place
from ktopt.plan_options import PlanOptions
from ktopt.popularity import load_popularity
from ktopt.render.style import plural, printable
from ktopt.ruleset import RuleSet
from ktopt.source import Document, SourceFile


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rules", metavar="RULES", help="a native rule file, - for standard input, or a shipped set")
    add_model(parser)
    add_storage(parser)
    add_target(parser)
    parser.add_argument(
        "--context", type=int, metavar="N", help=f"tokens of context that there is to be room for (default: {DEFAULT_CONTEXT})"
    )
    parser.add_argument("--anew", action="store_true", help="leave out the lines of `place:` that the file has")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the rule file with the map in it here; - prints it")


def run(args: argparse.Namespace) -> int:
    if not args.hardware:
        raise UsageError("on which machine? Give --hardware: here (this one), a preset such as 1x24GB, 2x3090+128GB, or a file")
    if args.context is not None and args.context < 1:
        raise UsageError(f"--context: a number of tokens from 1 on, not {args.context}")
    if args.rules.endswith(".json"):
        raise UsageError(f"{args.rules}: a plan has its places already; give the rule file that it was made from")
    options = compile_options(args)
    hardware: Hardware = options["hardware"]
    profile = options.pop("popularity")
    popularity = load_popularity(profile) if profile else None
    rules, model = rules_argument(args.rules), model_argument(args)
    compilation = run_stages(rules, model, weights=args.weights, **{**options, "hardware": None}, plan=False)
    source, ruleset, graph = compilation.document.source, compilation.ruleset, compilation.graph
    if ruleset is None or graph is None or compilation.report.stops_plan:
        print_report(compilation.report.sorted(), sys.stderr, compilation.document.sources)
        return 1
    if ruleset.form == "list":
        raise KtoptError(f"{source.path} is a list of rules, which has no `place:`; ktopt migrate turns it into the native form")
    if args.anew:
        ruleset = replace(ruleset, places=tuple(p for p in ruleset.places if p.origin.file != ruleset.path))
    stored = _stored(model, args.weights, graph, args.storage)
    given = {name: value for name, value in options.items() if value}
    placing = place(ruleset, graph, hardware, PlanOptions(**given), stored, args.context, popularity)
    text = _written(compilation.document, ruleset, placing, args.anew)
    sound = _check(SourceFile(source.path, text), graph, {**options, "weights": args.weights})
    if args.output:
        write_text(args.output, text)
    if args.output != "-":
        print(_shown(placing, hardware, graph.name))
        if args.output:
            print(f"wrote {args.output}", file=sys.stderr)
    return 0 if sound else 1


def _written(document: Document, ruleset: RuleSet, placing: Placing, anew: bool) -> str:
    """The file's text with the placement in it."""
    if placing.hot is not None:
        text = with_hot_experts(document, ruleset, placing.hot)
        document = replace(parse(SourceFile(document.source.path, text), Report()), imports=document.imports)
    return with_places(document, placing.lines, anew)


def _stored(model: Any, weights: Any, graph: Any, usual: str | None) -> Any:
    from ktopt.weights.storage import stored_for
    from ktopt.weights.usual import check_storage, usual_storage

    found = stored_for(model, weights, graph)
    return usual_storage(graph, check_storage(usual)) if found is None and usual else found


def _check(source: SourceFile, graph: Any, options: Mapping[str, Any]) -> bool:
    """Print what a plan with the map in it has against it; whether that is no error."""
    report = run_stages(source, graph, **options).report
    found = [d for d in report.sorted() if d.severity.value in ("error", "warning")]
    print_report(found, sys.stderr, {source.path: source})
    return not report.errors


def _shown(placing: Placing, hardware: Hardware, model: str) -> str:
    """The estimated time, what each device holds, and the map."""
    style, problem = style_of(sys.stdout), placing.case.problem
    rows = []
    for name, room in zip(problem.devices, problem.room_bytes, strict=True):
        held = placing.held[name]
        if held or room:
            rows.append([name, size(held), size(room) if room else "not known", f"{held / room:.0%}" if room else ""])
    heads = (Column("device"), Column("held", right=True), Column("room", right=True), Column("", right=True))
    lines = [f"  {key}: {text}" for key, text in ((_key(line.device), f'"{line.text}"') for line in placing.lines)]
    said = (
        f"{printable(model)} on {hardware.name}, {placing.case.context:,} tokens: about {placing.token_us / 1e3:,.1f} ms a decoded "
        f"token, {1e6 / placing.token_us:,.1f} tokens a second"
    )
    parts = [style.paint(said, "bold"), layout(heads, rows, 80, style), *_hot(placing), "place:\n" + "\n".join(lines)]
    notes = []
    if placing.hot is None and not placing.case.leaves_any:
        notes.append("the file says of every module where it goes, and that stays: --anew leaves the lines of its `place:` out")
    if placing.case.assumed:
        notes.append(f"taken for granted, since the machine's description doesn't say: {', '.join(placing.case.assumed)}")
    if not placing.proved:
        notes.append("it isn't certain that no placement is better (docs/placement.md#exactness)")
    return "\n\n".join([*parts, *notes])


def _hot(placing: Placing) -> list[str]:
    """How many experts are beside their layer on a card, and how often they are chosen."""
    if placing.hot is None:
        return []
    problem, assignment = placing.case.problem, placing.assignment
    split = [(i, item.split) for i, item in enumerate(problem.items) if item.split is not None]
    count = sum(assignment.hot_of(i) for i, _ in split)
    layers = sum(assignment.hot_of(i) > 0 for i, _ in split)
    if not count:
        return ["hot experts: none; all of a layer's are together"]
    share = sum(s.chosen[assignment.hot_of(i)] for i, s in split if assignment.hot_of(i)) / layers
    every = sum(len(s.shares) for i, s in split if assignment.hot_of(i))
    return [f"hot experts: {count:,} of {every:,} in {plural(layers, 'layer')}, which take {share:.0%} of the choices there"]


def _key(device: str) -> str:
    return device if ":" not in device else f'"{device}"'
