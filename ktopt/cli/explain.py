"""`ktopt explain CODE`: the page of a finding's code; `ktopt explain hardware`: what a hardware file holds."""

from __future__ import annotations

import argparse

from ktopt.codes import CODES, page
from ktopt.diagnostics import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "code", nargs="?", metavar="CODE", help="such as KT302; none lists them all. Or hardware: what --hardware can be"
    )


def run(args: argparse.Namespace) -> int:
    if args.code is None:
        for code in CODES.values():
            print(f"{code.code}  {code.severity:<8} {code.title}")
        return 0
    if args.code.lower() == "hardware":
        from ktopt.hardware import FILE_FORMAT

        print(FILE_FORMAT, end="")
        return 0
    if args.code.upper() not in CODES:
        raise UsageError(f"no code {args.code!r}; `ktopt explain` lists them")
    print(page(args.code), end="")
    return 0
