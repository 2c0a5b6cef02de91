"""`ktopt apply`: a rule file or plan, with weights, becomes a folder that transformers loads."""

from __future__ import annotations

import argparse
import sys

from ktopt.cli.options import add_model, add_target, model_argument, rules_argument, stage_options, weights_argument
from ktopt.cli.plan import ask_for_the_rest, show_findings
from ktopt.cli.terminal import Progress, size
from ktopt.compiler import run_stages
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.plan import Plan


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rules", metavar="RULES", help="a rule file, or a plan.json that ktopt plan -o wrote")
    add_model(parser)
    add_target(parser)
    parser.add_argument("--out", "-o", metavar="DIR", required=True, help="folder to write; an earlier one of ktopt's is replaced")
    parser.add_argument(
        "--for-another-machine", action="store_true", help="write it although this machine lacks devices that the plan uses"
    )
    parser.add_argument(
        "--context", dest="room", type=int, metavar="N", help="tokens of context that `place: auto` makes room for (default: 4096)"
    )
    parser.add_argument("--copy", action="store_true", help="put the weights into the folder; otherwise it refers to them")
    parser.add_argument("--force", action="store_true", help="go on although the plan holds errors, or other versions made it")


def run(args: argparse.Namespace) -> int:
    from ktopt.folder import check_writable, save_folder

    check_writable(args.out)
    weights = weights_argument(args)
    plan = plan_to_apply(args)
    from ktopt.applying.checks import check_devices, check_errors
    from ktopt.weights.tokenizer import find_tokenizer

    check_errors(plan, args.force)
    if not args.for_another_machine:
        check_devices(plan, ", or write the folder for the machine that has them with --for-another-machine")
    tokenizer = find_tokenizer((weights, args.model, plan.model.source))
    with Progress("copying") as progress:
        out = save_folder(plan, args.out, weights, copy_weights=args.copy, tokenizer=tokenizer, progress=progress)
    what = "with its weights" if args.copy else f"with references to {weights}"
    print(f"wrote {out} {what}: {size(plan.weight_bytes)} when loaded, on {', '.join(plan.devices)}")
    print(f'load it with: import ktopt; AutoModelForCausalLM.from_pretrained("{args.out}")')
    return 0


def plan_to_apply(args: argparse.Namespace) -> Plan:
    """The plan of a plan file, or of a rule file and a model; findings go to stderr. KtoptError where there is none."""
    if isinstance(args.rules, str) and args.rules.endswith(".json"):
        from ktopt.plan_check import open_plan

        _no_plan_options(args)
        return open_plan(args.rules, args.force)
    rules = rules_argument(args.rules) if isinstance(args.rules, str) else args.rules
    compilation = run_stages(rules, model_argument(args), **stage_options(args))
    show_findings(compilation)
    if compilation.plan is None:
        raise KtoptError(f"{args.rules}: no plan, for the errors above")
    ask_for_the_rest(compilation)
    for note in compilation.plan.notes:
        if note.startswith("place: auto"):
            print(note, file=sys.stderr)
    return compilation.plan


def _no_plan_options(args: argparse.Namespace) -> None:
    given = [f"--{name}" for name in ("hardware", "device", "dtype", "remap", "popularity") if getattr(args, name)]
    if given:
        raise UsageError(f"{args.rules} is a plan, and settles {', '.join(given)} already; give them to ktopt plan instead")
