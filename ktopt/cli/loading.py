"""What commands that generate text share: their arguments, and the way from those to a loaded model."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ktopt.cli.apply import plan_to_apply
from ktopt.cli.options import add_mode, add_model, add_target, add_threads, compile_options, weights_argument
from ktopt.cli.plan_table import plan_table
from ktopt.cli.terminal import Progress, columns, style_of
from ktopt.diagnostics import UsageError
from ktopt.folder import PLAN_FILE
from ktopt.plan import Plan
from ktopt.plan_check import open_plan
from ktopt.plan_options import LONG_CONTEXT
from ktopt.runtime.threads import Threads

MOST_TOKENS = 1 << 30
LEAST_TEMPERATURE = 0.001
"""Below it, logits divided by it overflow."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its tokenizer.

    name            what named it, for people
    weights         the files of its weights; None where a folder of ktopt apply has them
    baseline_bytes  what the process held before, with the libraries in it
    seconds         that loading took
    """

    model: Any
    tokenizer: Any
    name: str
    weights: str | None
    baseline_bytes: int
    seconds: float


def add_what_runs(parser: argparse.ArgumentParser) -> None:
    """The rules, the model, the machine and the mode."""
    parser.add_argument(
        "rules",
        metavar="RULES",
        nargs="?",
        help="a rule file, a plan.json, or a folder of ktopt apply; --mode long_context needs none",
    )
    add_model(parser)
    add_target(parser)
    add_threads(parser)
    add_mode(parser)
    parser.add_argument("--context", metavar="N", type=int, help="in that mode, the longest prompt, in tokens (max_seq_len)")
    parser.add_argument("--show-plan", action="store_true", help="print the plan's table first")
    parser.add_argument("--force", action="store_true", help="go on although the plan holds errors, or other versions made it")


def add_generation(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How a prompt is put to the model, and how tokens are chosen. `max_tokens` is the default of -n."""
    parser.add_argument("--system", metavar="TEXT", help="a system message before it")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    parser.add_argument(
        "-n", "--max-tokens", metavar="N", type=int, default=max_tokens, help=f"new tokens at most (default {max_tokens})"
    )
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument("--temperature", metavar="T", type=float, help="sample at this temperature; 0 is --greedy")
    parser.add_argument("--seed", metavar="N", type=int, help="make sampling repeatable")


def add_force_think(parser: argparse._ActionsContainer) -> None:
    """KTransformers' option, of chats."""
    parser.add_argument(
        "--force_think",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="begin every answer of a chat with <think>, for models that may leave it out (DeepSeek-R1)",
    )


def check_generation(args: argparse.Namespace) -> None:
    """UsageError for what can't be."""
    if not 1 <= args.max_tokens <= MOST_TOKENS:
        raise UsageError(f"--max-tokens: from 1 to {MOST_TOKENS:,}")
    if args.temperature and not LEAST_TEMPERATURE <= args.temperature < float("inf"):
        raise UsageError(f"--temperature: 0, or a number from {LEAST_TEMPERATURE:g} on")
    if args.seed is not None and not 0 <= args.seed < 1 << 64:
        raise UsageError("--seed: a whole number from 0 to 2**64 - 1")
    if args.greedy and args.temperature:
        raise UsageError("--greedy and --temperature exclude each other")


def load(args: argparse.Namespace, threads: Threads) -> Loaded:
    """The model that the arguments of add_what_runs and add_target name, with a bar on stderr. KtoptError where it can't be."""
    long = args.mode == LONG_CONTEXT
    args.room = max(getattr(args, "room", None) or 0, args.context or 0) or None
    plan, named, weights = _long_context(args) if long else _plain(args)
    if args.show_plan:
        print(plan_table(plan, columns(sys.stdout), style_of(sys.stdout)), flush=True)
    quiet_transformers()
    from ktopt.api import load_model
    from ktopt.runtime.memory import resident_bytes

    import_module("ktopt.applying")  # torch and transformers, whose memory is not the model's
    threads.set()
    baseline, start = resident_bytes(), time.perf_counter()
    with Progress("loading") as progress:
        made = (plan, weights) if weights is not None else ()
        model, tokenizer = load_model(named, *made, force=args.force, progress=progress)
    return Loaded(model, tokenizer, named, weights, baseline, time.perf_counter() - start)


def _plain(args: argparse.Namespace) -> tuple[Plan, str, str | None]:
    """The plan, what names the model, and its weights: None where it is a folder's own."""
    if args.rules is None:
        raise UsageError(f"which rules? Give a rule file, a plan.json or a folder of ktopt apply, or --mode {LONG_CONTEXT}")
    if args.context is not None:
        raise UsageError(f"--context goes with --mode {LONG_CONTEXT}; other caches grow as they must")
    if isinstance(args.rules, str) and Path(args.rules).is_dir():
        _refuse_beside_a_folder(args)
        return open_plan(Path(args.rules) / PLAN_FILE, args.force), args.rules, None
    weights = weights_argument(args)
    return plan_to_apply(args), args.model or weights, weights


def _refuse_beside_a_folder(args: argparse.Namespace) -> None:
    given = [f"--{name}" for name in ("model", "weights", "hardware", "device", "dtype", "remap") if getattr(args, name)]
    if given:
        raise UsageError(f"{args.rules} is a folder with a plan and its weights, which settle {', '.join(given)}; leave that out")


def _long_context(args: argparse.Namespace) -> tuple[Plan, str, str]:
    """The same in that mode. Without rules the model has those of the mode; without --model and --weights it is the config's."""
    from ktopt.arguments import config_given
    from ktopt.long_context.config import found_config
    from ktopt.long_context.loading import long_context_plan

    if args.context is not None and args.context < 1:
        raise UsageError(f"--context: a number of tokens from 1 on, not {args.context}")
    config = args.config = config_given(args.config) if args.config else found_config()
    if args.model is None and args.weights is None and config is not None:
        args.model = config.model.name_or_path
    weights = weights_argument(args)
    if args.rules is not None and Path(args.rules).is_dir():
        raise UsageError(f"{args.rules} is a folder of `ktopt apply`: in this mode give its rules or its plan.json, and --weights")
    named = args.model or weights
    made = plan_to_apply(args) if args.rules is not None else None
    options = {name: value for name, value in compile_options(args).items() if value and name not in ("config", "mode")}
    plan = long_context_plan(made, named, weights, config, longest=args.context, **({} if made else options))
    return plan, named, weights


def quiet_transformers() -> None:
    """Keep transformers' hints about generation flags and progress bars off the terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
