"""`ktopt profile`: measure this machine into a hardware file, which `--hardware` takes; or, with --experts, count how often a
model's experts are chosen, into a file that `--popularity` takes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ktopt.cli.options import add_model, add_target, add_threads, write_text
from ktopt.cli.terminal import TokenProgress
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.plan_options import MODES
from ktopt.runtime.threads import Threads, calm_openmp, parse_threads

MOST_TOKENS = 1 << 20
TEXT_LIMIT_BYTES = 64 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "rules", metavar="RULES", nargs="?", help="with --experts, the rules to run the model by (default: the model as it is)"
    )
    parser.add_argument("--output", "-o", metavar="FILE", default="-", help="write the file here (default: standard output)")
    parser.add_argument("--seconds", type=float, default=0.3, metavar="S", help="time for each number, at least (default: 0.3)")
    parser.add_argument(
        "--megabytes", type=int, default=256, metavar="N", help="what is read at a time, more than caches hold (default: 256)"
    )
    add_threads(parser)
    group = parser.add_argument_group("experts")
    group.add_argument(
        "--experts", action="store_true", help="run a model on a text, and count how often each expert of each layer is chosen"
    )
    group.add_argument("--text", metavar="FILE", help="the text, in UTF-8; - for standard input")
    group.add_argument("--tokens", metavar="N", type=int, default=16384, help="tokens of it to read at most (default: 16384)")
    group.add_argument("--force", action="store_true", help="go on although the plan holds errors, or other versions made it")
    add_model(parser)
    add_target(parser)
    parser.set_defaults(mode=MODES[0], config=None, context=None, show_plan=False)


def run(args: argparse.Namespace) -> int:
    if not 0 < args.seconds <= 60:
        raise UsageError(f"--seconds: a time above 0 and up to 60, not {args.seconds:g}")
    if not 1 <= args.megabytes <= 1 << 16:
        raise UsageError(f"--megabytes: from 1 to {1 << 16}, not {args.megabytes}")
    threads = parse_threads(args.threads, args.affinity)
    threads.stay_on_cores()
    calm_openmp()
    return _experts(args, threads) if args.experts else _machine(args, threads)


def _machine(args: argparse.Namespace, threads: Threads) -> int:
    names = ("rules", "text", "model", "weights", "hardware", "device", "dtype", "chunk_size", "remap")
    if given := [name for name in names if getattr(args, name)]:
        asked = "RULES" if given[0] == "rules" else f"--{given[0]}"
        raise UsageError(f"{asked} goes with --experts, which runs a model; without it this machine is measured")
    import yaml

    from ktopt.measuring import measure

    threads.set()
    found = measure(args.seconds, args.megabytes, lambda what: print(f"measuring {what}", file=sys.stderr, flush=True))
    write_text(args.output, yaml.safe_dump(found, sort_keys=False, width=120, default_flow_style=None))
    if args.output != "-":
        print(f"wrote {args.output}; --hardware {args.output} takes it", file=sys.stderr)
    return 0


def _experts(args: argparse.Namespace, threads: Threads) -> int:
    if args.text is None:
        raise UsageError("which text? Give --text: a file like what the model will be used for, or - for standard input")
    if not 1 <= args.tokens <= MOST_TOKENS:
        raise UsageError(f"--tokens: from 1 to {MOST_TOKENS:,}, not {args.tokens}")
    text = _text(args.text)
    from ktopt.api import UNCHANGED
    from ktopt.cli.loading import load

    if args.rules is None:
        args.rules, args.device = UNCHANGED, args.device or "cpu"
    loaded = load(args, threads)
    from ktopt.counting import count_experts

    ids = list(loaded.tokenizer(text)["input_ids"])[: args.tokens]
    with TokenProgress("counting") as progress:
        profile = count_experts(loaded.model, ids, say=progress)
    write_text(args.output, profile.to_json())
    if args.output != "-":
        print(
            f"wrote {args.output}: {profile.tokens:,} tokens, {len(profile.layers)} layers; ktopt place --popularity {args.output} "
            "takes it",
            file=sys.stderr,
        )
    return 0


def _text(name: str) -> str:
    """The text in a file, or on standard input. UsageError where it can't be read as one."""
    try:
        if name == "-":
            data = sys.stdin.buffer.read(TEXT_LIMIT_BYTES)
        else:
            with Path(name).open("rb") as file:
                data = file.read(TEXT_LIMIT_BYTES)
        text = data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"--text {name}: can't be read: {error.strerror or error}") from None
    except UnicodeError:
        raise UsageError(f"--text {name}: isn't UTF-8 text") from None
    if not text.strip():
        raise KtoptError(f"--text {name}: holds no text")
    return text
