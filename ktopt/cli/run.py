"""`ktopt run`: apply a rule file and answer a prompt, as the text comes; then what it took."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Any

from ktopt.cli.loading import add_generation, add_what_runs, check_generation, load
from ktopt.cli.terminal import size, style_of
from ktopt.diagnostics import UsageError
from ktopt.plan_options import LONG_CONTEXT
from ktopt.runtime.memory import return_large_blocks
from ktopt.runtime.threads import calm_openmp, parse_threads
from ktopt.weights.tokenizer import stop_tokens

PROMPT_LIMIT_CHARACTERS = 4 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    add_what_runs(parser)
    parser.add_argument("--prompt", "-p", metavar="TEXT", required=True, help="what to ask; - reads it from standard input")
    add_generation(parser, max_tokens=256)
    parser.add_argument("--quiet", "-q", action="store_true", help="print the answer alone")


def run(args: argparse.Namespace) -> int:
    calm_openmp()
    return_large_blocks()
    threads = parse_threads(args.threads, args.affinity)
    threads.stay_on_cores()
    options = sampling(args)
    text = _text(args.prompt)
    args.room = tokens_of(text) + args.max_tokens
    loaded = load(args, threads)
    if args.mode == LONG_CONTEXT:
        from ktopt.cli.long_run import run_long

        return run_long(args, loaded, text, options)
    from ktopt.runtime.generation import generate_stream

    model, tokenizer = loaded.model, loaded.tokenizer
    if args.seed is not None:
        import torch

        torch.manual_seed(args.seed)
    options["eos_token_id"] = stop_tokens(model.generation_config.eos_token_id, tokenizer)
    stream = generate_stream(
        model, tokenizer, prompt_of(args, text, tokenizer), args.max_tokens, baseline_bytes=loaded.baseline_bytes, **options
    )
    with closing(stream):
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    print()
    if not args.quiet and stream.stats is not None:
        print("\n" + style_of(sys.stdout).paint(summary(stream.stats, loaded.seconds), "dim"))
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


def tokens_of(text: str) -> int:
    """About how many tokens a text has at most, before there is a tokenizer: one for two letters, and one for each other sign."""
    letters = sum(map(str.isascii, text))
    return letters // 2 + len(text) - letters + 1


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Options of transformers' generate. Without any, the model's own generation config decides. UsageError for what can't be."""
    check_generation(args)
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
