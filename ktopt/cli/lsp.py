"""`ktopt lsp`: the language server, which an editor starts."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from ktopt.diagnostics import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stdio", action="store_true", help="talk over standard input and output, as it does anyway")
    parser.add_argument("--clientProcessId", metavar="PID", help=argparse.SUPPRESS)  # some editors add it


def run(args: argparse.Namespace) -> int:
    if find_spec("pygls") is None or find_spec("lsprotocol") is None:
        raise UsageError("the language server needs pygls: pip install 'ktopt[lsp]'")
    from ktopt.lsp.server import serve

    return serve()
