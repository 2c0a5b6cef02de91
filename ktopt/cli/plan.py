"""`ktopt plan`: what each module becomes, as a table, as JSON, or as a lock file."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ktopt.cli.findings import at_least, count, print_report
from ktopt.cli.options import (
    add_context,
    add_force,
    add_mode,
    add_model,
    add_storage,
    add_target,
    context_options,
    model_argument,
    rules_argument,
    stage_options,
    write_text,
)
from ktopt.cli.terminal import columns, style_of
from ktopt.compiler import Compilation, run_stages
from ktopt.diagnostics import KtoptError, Severity, UsageError
from ktopt.plan import Plan
from ktopt.plan_options import LONG_CONTEXT
from ktopt.render.style import printable
from ktopt.selector.fields import about_machine, about_storage
from ktopt.source import SourceFile

if TYPE_CHECKING:
    from ktopt.graph import ModuleGraph
    from ktopt.working_memory.asked import Memory


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "rules",
        metavar="RULES",
        nargs="?",
        help="a rule file, - for standard input, a shipped set such as smollm2/cpu, or a plan.json to show; --mode long_context "
        "needs none",
    )
    add_model(parser)
    add_storage(parser)
    add_target(parser)
    add_force(parser)
    add_mode(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the plan as JSON, for ktopt apply and ktopt diff")
    parser.add_argument("--lock", action="store_true", help="write RULES.lock.json, which ktopt check --locked compares with")
    add_context(parser)
    parser.add_argument("--all", action="store_true", help="show modules too that have no weights and no rule")


def run(args: argparse.Namespace) -> int:
    if args.rules is not None and args.rules.endswith(".json"):
        return _show_file(args)
    if args.lock and args.storage:
        raise UsageError("--lock writes what ktopt check --locked makes again, which knows no --storage: give --weights to both")
    rules = rules_argument(args.rules) if args.rules is not None else _rules_of_the_mode(args)
    compilation = run_stages(rules, model_argument(args), **stage_options(args), **context_options(args))
    plan = compilation.plan
    errors = show_findings(compilation)
    if plan is None:
        return 1
    ask_for_the_rest(compilation)
    if args.lock:
        _write_lock(compilation.document.source.path, plan)
    if args.output:
        from ktopt.plan_json import dump_plan

        write_text(args.output, dump_plan(plan))
        print(f"wrote {args.output}", file=sys.stderr)
    if args.output != "-":
        show(plan, args, asked(plan, args, compilation.graph))
    return 1 if errors else 0


def _rules_of_the_mode(args: argparse.Namespace) -> SourceFile:
    """The rules that a model has in mode long_context without others; without --model and --weights the config says which model."""
    if args.mode != LONG_CONTEXT or args.lock:
        raise UsageError(
            "which rules? Give a rule file, - for standard input, a shipped set or a plan.json"
            + ("; --lock writes beside a rule file" if args.lock else f", or --mode {LONG_CONTEXT}")
        )
    from ktopt.arguments import config_given
    from ktopt.long_context.config import found_config
    from ktopt.long_context.rules import rules_for

    config = args.config = config_given(args.config) if args.config else found_config()
    if config is not None and args.model is None and args.weights is None:
        args.model = config.model.name_or_path
    device = args.device or (config.model.device if config is not None else None) or "cpu"
    return rules_for(model_argument(args), device)


def _show_file(args: argparse.Namespace) -> int:
    """Show a plan that was written earlier, and the errors that it holds."""
    from ktopt.plan_check import open_plan

    context_options(args)
    plan = open_plan(args.rules, args.force)
    memory = asked(plan, args)
    show(plan, args, memory)
    for error in plan.errors:
        print(printable(error), file=sys.stderr)
    for _, message, help in memory.findings() if memory is not None else ():
        print(printable(f"{args.rules}: KT507 error: {message}\n  help: {help}"), file=sys.stderr)
    return 1 if plan.errors or (memory is not None and memory.over) else 0


def asked(plan: Plan, args: argparse.Namespace, graph: ModuleGraph | None = None) -> Memory | None:
    """What the context of --context takes; None without it."""
    if args.context is None:
        return None
    from ktopt.hardware import load_hardware
    from ktopt.trees import load_tree
    from ktopt.weights.storage import stored_for
    from ktopt.working_memory.asked import memory_of

    if graph is None and plan.model.config.get("model_type"):
        graph = load_tree(plan.model.config)
    stored = stored_for(args.model, args.weights, graph) if graph is not None else None
    usual = getattr(args, "storage", None)
    if stored is None and graph is not None and usual:
        from ktopt.weights.usual import check_storage, usual_storage

        stored = usual_storage(graph, check_storage(usual))
    hardware = load_hardware(args.hardware) if args.hardware else None
    return memory_of(plan, args.context, args.batch or 1, hardware=hardware, graph=graph, stored=stored)


def show(plan: Plan, args: argparse.Namespace, memory: Memory | None = None) -> None:
    """Print the plan as --format says, and after it what a context takes."""
    if args.format == "json":
        from ktopt.plan_json import dump_plan

        text = dump_plan(plan)
        if memory is not None:
            text = f'{{\n"plan": {text.rstrip()},\n"memory": {json.dumps(memory.to_json(), indent=2)}\n}}\n'
        sys.stdout.write(text)
        return
    from ktopt.cli.plan_table import plan_table

    style = style_of(sys.stdout)
    sys.stdout.write(plan_table(plan, columns(sys.stdout), style, everything=args.all))
    if memory is not None:
        from ktopt.cli.memory_table import memory_table

        sys.stdout.write("\n" + memory_table(memory, style))


def show_findings(compilation: Compilation) -> bool:
    """Print warnings and errors to stderr; whether there are errors. Where there is a plan, without those that comments silence."""
    found = compilation.report.sorted() if compilation.plan is None else compilation.unsilenced
    shown = at_least(found, Severity.WARNING)
    if shown:
        print_report(shown, sys.stderr, compilation.document.sources)
        print(f"\n{count(shown)}", file=sys.stderr)
    return any(d.severity is Severity.ERROR for d in shown)


def ask_for_the_rest(compilation: Compilation) -> None:
    """KtoptError where rules or places ask about a machine that nobody described, or about weights that nobody gave."""
    for kind, asks, say in (
        (
            about_machine,
            "depends on the machine",
            "Say which: --hardware here (this one), a preset such as 1x24GB, or a file that describes it",
        ),
        (about_storage, "depends on how weights are stored", "Say in which file: --weights"),
    ):
        unsettled = compilation.matches.unsettled(kind) if compilation.matches is not None else []
        if unsettled:
            places = ", ".join(f"{name} ({origin})" for name, origin in unsettled)
            raise KtoptError(f"whether these hold {asks}: {places}\n  {say}")


def _write_lock(rules: str, plan: Plan) -> None:
    if rules == "-":
        raise UsageError("--lock writes beside the rule file, and standard input has no place")
    from ktopt.locking import lock_path
    from ktopt.plan_json import dump_lock

    path = lock_path(rules)
    write_text(str(path), dump_lock(plan))
    print(f"wrote {path}", file=sys.stderr)
