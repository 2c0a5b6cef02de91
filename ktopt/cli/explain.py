"""`ktopt explain CODE`: the page of a finding's code; `ktopt explain hardware`: what a hardware file holds."""

from __future__ import annotations

import argparse

from ktopt.codes import CODES, page
from ktopt.diagnostics import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "codes",
        nargs="*",
        metavar="CODE",
        help="such as KT302, or KT3 for the list of its class; none lists them all. Or hardware: what --hardware can be",
    )


def run(args: argparse.Namespace) -> int:
    print("\n".join(_text(asked) for asked in args.codes or ["KT"]), end="")
    return 0


def _text(asked: str) -> str:
    """A code's page, the list of the codes that begin so, or what a hardware file holds."""
    if asked.lower() == "hardware":
        from ktopt.hardware import FILE_FORMAT

        return FILE_FORMAT
    if asked.upper() in CODES:
        return page(asked)
    listed = [code for code in CODES.values() if code.code.startswith(asked.upper())]
    if not listed:
        raise UsageError(f"no code {asked!r}; `ktopt explain` lists them")
    return "".join(f"{code.code}  {code.severity:<8} {code.title}\n" for code in listed)
