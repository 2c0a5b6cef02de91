"""`python -m ktopt.local_chat`: `ktopt chat`, with the options of KTransformers' local_chat.py beside its own."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ktopt.cli import USAGE, complain, main, parser_of

SAME = {
    "model_path": "--model",
    "gguf_path": "--weights",
    "max_new_tokens": "--max-tokens",
    "cpu_infer": "--threads",
    "chunk_prefill_size": "--chunk_size",
}
"""KTransformers' names of options that have others here."""


def arguments(given: Sequence[str]) -> list[str]:
    """The arguments of `ktopt chat` that are meant. ValueError for an option that neither program has."""
    from ktopt.cli import chat
    from ktopt.operator import nearest

    ours = parser_of("chat", chat)
    theirs = _parser()
    args, rest = theirs.parse_known_args(given)
    known = [*ours._option_string_actions, *theirs._option_string_actions]
    for word in rest:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known:
            near = nearest(name, known)
            raise ValueError(f"no option {name}; " + (f"did you mean {near}?" if near else "--help lists the options"))
    if (think := args.force_think or "false").lower() not in ("true", "false"):
        raise ValueError(f"--force_think {think}: true or false")
    made = [args.optimize_config_path] if args.optimize_config_path else []
    for name, option in SAME.items():
        if (value := getattr(args, name)) is not None:
            made += [option, _shipped(value) if name == "model_path" else value]
    return made + ["--force_think"] * (think.lower() == "true") + rest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ktopt.local_chat", description=f"{__doc__}", allow_abbrev=False, argument_default=None
    )
    for name, option in {"optimize_config_path": "RULES", **SAME}.items():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", metavar="X", help=f"{option} of ktopt chat")
    parser.add_argument("--use_cuda_graph", nargs="?", metavar="X", help="taken, and has no effect: there is nothing to switch")
    parser.add_argument("--force_think", nargs="?", const="true", metavar="X", help="--force_think of ktopt chat")
    return parser


def _shipped(model: str) -> str:
    """The shipped name of a model that is named as on the hub, such as deepseek-ai/DeepSeek-V3."""
    from ktopt.models.shipped import known_models

    name = model.rpartition("/")[2].lower()
    return name if not os.path.exists(model) and name in known_models() else model


def run(given: Sequence[str]) -> int:
    """Chat, and the exit code."""
    try:
        meant = arguments(given)
    except ValueError as error:
        return complain(error, USAGE)
    return main(["chat", *meant])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
