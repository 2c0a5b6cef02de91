"""`ktopt check`: what is wrong with rule files, with place and remedy."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ktopt.cli.findings import at_least, count, print_report, sources_of
from ktopt.cli.lock import lock_differences
from ktopt.cli.options import add_model, add_target, compile_options, model_argument, rule_files, rules_argument
from ktopt.cli.terminal import style_of
from ktopt.compiler import run_stages
from ktopt.diagnostics import CompileError, Diagnostic, Severity, UsageError
from ktopt.plan import Plan
from ktopt.render import FORMATS
from ktopt.render.style import plural
from ktopt.source import SourceFile


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rules", nargs="+", metavar="RULES", help="rule files, folders of them, or - for standard input")
    add_model(parser)
    add_target(parser)
    parser.add_argument("--format", choices=FORMATS, default="full", help="full (with source lines), concise, json or jsonl")
    parser.add_argument(
        "--fail-on", choices=[str(s) for s in Severity], default="error", help="gravity from which findings make the exit code 1"
    )
    parser.add_argument("--stdin-filename", metavar="NAME", help="what messages call standard input")
    parser.add_argument("--locked", action="store_true", help="fail where the plan differs from RULES.lock.json (see plan --lock)")
    parser.add_argument("--verbose", "-v", action="store_true", help="show infos too; json and jsonl always do")


def run(args: argparse.Namespace) -> int:
    model = _load(model_argument(args, required=False))
    if args.locked and model is None:
        raise UsageError("--locked compares the plan, which needs --model")
    options = compile_options(args)
    found: list[Diagnostic] = []
    sources: dict[str, SourceFile] = {}
    failed = False
    args.rules = [file for name in args.rules for file in rule_files(name)]
    for name in args.rules:
        try:
            compilation = run_stages(rules_argument(name, args.stdin_filename), model, **options)
        except CompileError as error:  # the file can't be read
            found += error.report.sorted()
            continue
        found += [d for d in compilation.report.sorted() if d not in found]
        sources |= sources_of(compilation.document)
        if args.locked and compilation.plan is not None:
            failed |= _differs_from_lock(compilation.document.source.path, compilation.plan)
    _print(args, found, sources, model is not None)
    return 1 if failed or at_least(found, Severity(args.fail_on)) else 0


def _load(model: str | None) -> Any:
    """The tree, built once for all files."""
    if model is None:
        return None
    from ktopt.trees import load_tree

    return load_tree(model)


def _differs_from_lock(rules: str, plan: Plan) -> bool:
    differences = lock_differences(rules, plan)
    for line in differences:
        print(line, file=sys.stderr)
    return bool(differences)


def _print(args: argparse.Namespace, found: list[Diagnostic], sources: dict[str, SourceFile], with_model: bool) -> None:
    if args.format in ("json", "jsonl"):
        print_report(found, sys.stdout, format=args.format)
        return
    lowest = Severity.INFO if args.verbose or args.fail_on == "info" else Severity.WARNING
    shown = at_least(found, lowest)
    print_report(shown, sys.stdout, sources, args.format)
    print(("\n" if shown and args.format == "full" else "") + _summary(args, found, len(found) - len(shown), with_model))


def _summary(args: argparse.Namespace, found: list[Diagnostic], hidden: int, with_model: bool) -> str:
    style = style_of(sys.stdout)
    files = plural(len(args.rules), "file")
    grave = at_least(found, Severity.WARNING)
    if grave:
        worst = "red" if any(d.severity is Severity.ERROR for d in grave) else "yellow"
        text = style.paint(f"Found {count(grave)} in {files}", worst)
    else:
        text = style.paint(f"No problems in {files}", "green")
    if hidden:
        text += f", and {plural(hidden, 'info')} (-v shows them)"
    return text + "." + ("" if with_model else " Selection and placement are checked with --model only.")
