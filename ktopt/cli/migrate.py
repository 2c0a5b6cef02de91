"""`ktopt migrate OLD`: a list-form rule file in the native form, proved to resolve alike."""

from __future__ import annotations

import argparse
import sys

from ktopt.authoring.migrating import Migration, migrate
from ktopt.authoring.modeline import SCHEMA_FILE, modeline
from ktopt.cli.findings import print_report
from ktopt.cli.options import write_text
from ktopt.diagnostics import CompileError
from ktopt.parse import read_source
from ktopt.render.style import plural


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", help="a list-form rule file, or - for standard input")
    parser.add_argument(
        "--model",
        "-m",
        metavar="M",
        action="append",
        default=[],
        help="a model to prove it on, repeatable (default: the shipped models that the file fits best)",
    )
    parser.add_argument("--output", "-o", metavar="NEW", default="-", help="write the native file here (default: standard output)")
    parser.add_argument("--schema", metavar="URL", default="", help=f"what its modeline names (default: a {SCHEMA_FILE} above)")


def run(args: argparse.Namespace) -> int:
    from ktopt.trees import load_tree

    source = read_source(args.old)
    graphs = [load_tree(model) for model in dict.fromkeys(args.model)]
    line = modeline(args.output, args.schema)
    try:
        made = migrate(source, graphs, path=args.output, modeline=line)
    except CompileError as error:
        print_report(error.report.sorted(), sys.stderr, {source.path: source})
        print("\nThe file has errors: mend them first, then migrate.", file=sys.stderr)
        return 1
    write_text(args.output, made.text)
    print(summary(made), file=sys.stderr)
    return 0


def summary(made: Migration) -> str:
    """What was proved, and what the author has to know."""
    before, after = made.rules
    models = ", ".join(
        f"{model} ({plural(count, 'module')} compared)" for model, count in zip(made.models, made.modules, strict=True)
    )
    lines = [f"{plural(before, 'rule')} became {after}; both files resolve alike on {models}"]
    return "\n".join([*lines, *(f"  {note}" for note in made.notes)])
