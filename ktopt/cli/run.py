"""`ktopt run`: apply a rule file and answer a prompt, as the text comes; then what it took."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from ktopt.cli.apply import plan_to_apply
from ktopt.cli.options import add_mode, add_model, add_target, add_threads, weights_argument
from ktopt.cli.plan_table import plan_table
from ktopt.cli.terminal import Progress, columns, size, style_of
from ktopt.diagnostics import UsageError
from ktopt.folder import PLAN_FILE
from ktopt.plan import Plan
from ktopt.plan_check import open_plan
from ktopt.plan_options import LONG_CONTEXT
from ktopt.runtime.memory import return_large_blocks
from ktopt.runtime.threads import calm_openmp, parse_threads
from ktopt.weights.tokenizer import stop_tokens

PROMPT_LIMIT_CHARACTERS = 4 << 20
MOST_TOKENS = 1 << 30
LEAST_TEMPERATURE = 0.001
"""Below it, logits divided by it overflow."""


def configure(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--prompt", "-p", metavar="TEXT", required=True, help="what to ask; - reads it from standard input")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    parser.add_argument("-n", "--max-tokens", metavar="N", type=int, default=256, help="new tokens at most (default 256)")
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument("--temperature", metavar="T", type=float, help="sample at this temperature; 0 is --greedy")
    parser.add_argument("--seed", metavar="N", type=int, help="make sampling repeatable")
    parser.add_argument("--show-plan", action="store_true", help="print the plan's table first")
    parser.add_argument("--quiet", "-q", action="store_true", help="print the answer alone")
    parser.add_argument("--force", action="store_true", help="go on although the plan holds errors, or other versions made it")


def run(args: argparse.Namespace) -> int:
    calm_openmp()
    return_large_blocks()
    threads = parse_threads(args.threads, args.affinity)
    threads.stay_on_cores()
    options = sampling(args)
    text = _text(args.prompt)
    if args.mode == LONG_CONTEXT:
        from ktopt.cli.long_run import run_long

        threads.set()
        return run_long(args, text, options)
    if args.rules is None:
        raise UsageError(f"which rules? Give a rule file, a plan.json or a folder of ktopt apply, or --mode {LONG_CONTEXT}")
    if args.context is not None:
        raise UsageError(f"--context goes with --mode {LONG_CONTEXT}; other caches grow as they must")
    folder = Path(args.rules).is_dir()
    if folder:
        _refuse_beside_a_folder(args)
    weights = None if folder else weights_argument(args)
    plan = open_plan(Path(args.rules) / PLAN_FILE, args.force) if folder else plan_to_apply(args)
    if args.show_plan:
        print(plan_table(plan, columns(sys.stdout), style_of(sys.stdout)), flush=True)
    quiet_transformers()
    from ktopt.runtime.generation import generate_stream
    from ktopt.runtime.memory import resident_bytes

    import_module("ktopt.applying")  # torch and transformers, whose memory is not the model's
    threads.set()
    baseline = resident_bytes()
    start = time.perf_counter()
    with Progress("loading") as progress:
        model, tokenizer = _load(args, plan, weights, progress)
    loaded_s = time.perf_counter() - start
    if args.seed is not None:
        import torch

        torch.manual_seed(args.seed)
    options["eos_token_id"] = stop_tokens(model.generation_config.eos_token_id, tokenizer)
    stream = generate_stream(
        model, tokenizer, prompt_of(args, text, tokenizer), args.max_tokens, baseline_bytes=baseline, **options
    )
    with closing(stream):
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    print()
    if not args.quiet and stream.stats is not None:
        print("\n" + style_of(sys.stdout).paint(summary(stream.stats, loaded_s), "dim"))
    return 0


def _text(prompt: str) -> str:
    """What is asked. UsageError where its bytes are no text: by some locales they are read as halves of surrogate pairs."""
    try:
        text = sys.stdin.read(PROMPT_LIMIT_CHARACTERS) if prompt == "-" else prompt
        text.encode("utf-8")
    except UnicodeError:
        what = "-: standard input isn't" if prompt == "-" else "isn't"
        raise UsageError(f"--prompt {what} UTF-8 text") from None
    return text


def _refuse_beside_a_folder(args: argparse.Namespace) -> None:
    given = [f"--{name}" for name in ("model", "weights", "hardware", "device", "dtype", "remap") if getattr(args, name)]
    if given:
        raise UsageError(f"{args.rules} is a folder with a plan and its weights, which settle {', '.join(given)}; leave that out")


def _load(args: argparse.Namespace, plan: Plan, weights: str | None, progress: Progress) -> tuple[Any, Any]:
    """The model and its tokenizer: a folder's own, or a plan carried out on `weights`."""
    from ktopt.api import load_model

    if weights is None:
        return load_model(args.rules, force=args.force, progress=progress)
    return load_model(args.model or weights, plan, weights, force=args.force, progress=progress)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Options of transformers' generate. Without any, the model's own generation config decides. UsageError for what can't be."""
    if not 1 <= args.max_tokens <= MOST_TOKENS:
        raise UsageError(f"--max-tokens: from 1 to {MOST_TOKENS:,}")
    if args.temperature and not LEAST_TEMPERATURE <= args.temperature < float("inf"):
        raise UsageError(f"--temperature: 0, or a number from {LEAST_TEMPERATURE:g} on")
    if args.seed is not None and not 0 <= args.seed < 1 << 64:
        raise UsageError("--seed: a whole number from 0 to 2**64 - 1")
    if args.greedy and args.temperature:
        raise UsageError("--greedy and --temperature exclude each other")
    if args.greedy or args.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": args.temperature} if args.temperature else {}


def prompt_of(args: argparse.Namespace, text: str, tokenizer: Any) -> str | list[dict[str, str]]:
    """Chat messages, or the text itself with --raw or where the model has no chat template."""
    if args.raw or not getattr(tokenizer, "chat_template", None):
        if args.system:
            raise UsageError(
                "--system needs a chat template" + (", which --raw leaves out" if args.raw else ", and this model has none")
            )
        return text
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": text}]


def summary(stats: Any, loaded_s: float) -> str:
    """What it took, in two lines."""
    memory = [f"memory {size(stats.peak_bytes)}"] + [f"{device} {size(count)}" for device, count in stats.device_bytes.items()]
    speed = f", then {stats.decode_tokens_per_s:.1f} tokens/s" if stats.decode_tokens_per_s else ""
    return (
        f"{stats.new_tokens} tokens from {stats.prompt_tokens}: the first after {stats.first_token_s:.2f} s{speed}\n"
        f"loaded in {loaded_s:.2f} s; peak {', '.join(memory)} beyond the interpreter and its libraries"
    )


def quiet_transformers() -> None:
    """Keep transformers' hints about generation flags and progress bars off the terminal."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
