"""`ktopt run --mode long_context`: a prompt is read with a progress bar; after the answer come its speed and its cache's tiers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from ktopt.cli.apply import plan_to_apply
from ktopt.cli.options import compile_options, weights_argument
from ktopt.cli.plan_table import plan_table
from ktopt.cli.run import prompt_of, quiet_transformers
from ktopt.cli.table import Column, layout
from ktopt.cli.terminal import Progress, TokenProgress, columns, style_of
from ktopt.diagnostics import UsageError
from ktopt.plan import Plan


def run_long(args: argparse.Namespace, text: str, options: dict[str, Any]) -> int:
    """Load the model, read `text`, answer it. `options` are those of transformers' `generate`."""
    if args.context is not None and args.context < 1:
        raise UsageError(f"--context: a number of tokens from 1 on, not {args.context}")
    plan, model_name, weights = _what_runs(args)
    if args.show_plan:
        print(plan_table(plan, columns(sys.stdout), style_of(sys.stdout)), flush=True)
    quiet_transformers()
    from ktopt.api import load_model
    from ktopt.long_context.sampling import chooser
    from ktopt.long_context.session import LongContextSession
    from ktopt.runtime.generation import encode

    start = time.perf_counter()
    with Progress("loading") as progress:
        model, tokenizer = load_model(model_name, plan, weights, force=args.force, progress=progress)
    loaded_s = time.perf_counter() - start
    if args.seed is not None:
        import torch

        torch.manual_seed(args.seed)
    ids_1N = encode(model, tokenizer, prompt_of(args, text, tokenizer))["input_ids"]
    with closing(LongContextSession(model, tokenizer, weights=weights)) as session:
        for piece in _answer(session, ids_1N, args.max_tokens, chooser(model, options)):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
        if not args.quiet:
            print("\n" + style_of(sys.stdout).paint(summary(session, loaded_s), "dim"))
    return 0


def _what_runs(args: argparse.Namespace) -> tuple[Plan, str, str]:
    """The plan, what names the model, and its weights. Without rules the model has those of this mode; without --model and
    --weights it is the config's."""
    from ktopt.arguments import config_given
    from ktopt.long_context.config import found_config
    from ktopt.long_context.loading import long_context_plan

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


def _answer(session: Any, ids_1N: Any, most: int, choose: Any) -> Iterator[str]:
    """The text of an answer as it comes, up to a token that ends it."""
    from ktopt.runtime.generation import IncrementalText
    from ktopt.weights.tokenizer import stop_tokens

    config = session.model.generation_config
    ends = stop_tokens(config.eos_token_id if config is not None else None, session.tokenizer) or []
    written = IncrementalText(session.tokenizer)
    with TokenProgress("reading") as session.progress:
        tokens = session.generate(ids_1N, most, choose)
        token = next(tokens, None)
    while token is not None and token not in ends:
        yield written.add([token])
        token = next(tokens, None)
    yield written.rest()


def summary(session: Any, loaded_s: float) -> str:
    """What it took, in two lines, and the tiers of the cache."""
    done = session.statistics
    lines = [
        f"read {done.prompt_tokens:,} tokens in {done.prompt_s:.2f} s ({done.prompt_tokens_per_s:,.1f} tokens/s), "
        f"then {done.decode_tokens_per_s:.1f} tokens/s",
        f"loaded in {loaded_s:.2f} s; the cache holds {session.length:,} of {session.capacity:,} tokens",
    ]
    if table := session.table():
        head, *rows = table
        lines += ["", layout([Column(title, right=place > 0) for place, title in enumerate(head)], rows, 100, least=8)]
    return "\n".join(lines)
