"""`ktopt schema NAME`: one of the JSON Schemas that ship with ktopt, for editors and other programs."""

from __future__ import annotations

import argparse
from importlib.resources import files
from importlib.resources.abc import Traversable

from ktopt.diagnostics import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="such as ruleset or plan; none lists them")


def schemas() -> dict[str, Traversable]:
    """The schemas by name."""
    return {f.name.removesuffix(".schema.json"): f for f in files("ktopt.schemas").iterdir() if f.name.endswith(".schema.json")}


def run(args: argparse.Namespace) -> int:
    found = schemas()
    if args.name is None:
        print("\n".join(sorted(found)))
        return 0
    if args.name not in found:
        raise UsageError(f"no schema {args.name!r}; there are {', '.join(sorted(found)) or 'none in this checkout'}")
    print(found[args.name].read_text(encoding="utf-8"), end="")
    return 0
