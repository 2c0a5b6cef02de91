"""`ktopt profile`: measure this machine into a hardware file, which `--hardware` takes."""

from __future__ import annotations

import argparse
import sys

from ktopt.cli.options import add_threads, write_text
from ktopt.diagnostics import UsageError
from ktopt.runtime.threads import calm_openmp, parse_threads


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", "-o", metavar="FILE", default="-", help="write the hardware file here (default: standard output)"
    )
    parser.add_argument("--seconds", type=float, default=0.3, metavar="S", help="time for each number, at least (default: 0.3)")
    parser.add_argument(
        "--megabytes", type=int, default=256, metavar="N", help="what is read at a time, more than caches hold (default: 256)"
    )
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    if not 0 < args.seconds <= 60:
        raise UsageError(f"--seconds: a time above 0 and up to 60, not {args.seconds:g}")
    if not 1 <= args.megabytes <= 1 << 16:
        raise UsageError(f"--megabytes: from 1 to {1 << 16}, not {args.megabytes}")
    threads = parse_threads(args.threads, args.affinity)
    threads.stay_on_cores()
    calm_openmp()
    import yaml

    from ktopt.measuring import measure

    threads.set()
    found = measure(args.seconds, args.megabytes, lambda what: print(f"measuring {what}", file=sys.stderr, flush=True))
    write_text(args.output, yaml.safe_dump(found, sort_keys=False, width=120, default_flow_style=None))
    if args.output != "-":
        print(f"wrote {args.output}; --hardware {args.output} takes it", file=sys.stderr)
    return 0
