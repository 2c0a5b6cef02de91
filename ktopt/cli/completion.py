"""`ktopt completion SHELL`: a script that makes a shell complete commands, options and their values."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib import import_module

SHELLS = ("bash", "zsh", "fish")
_WHERE = {
    "bash": 'eval "$(ktopt completion bash)" in ~/.bashrc',
    "zsh": "ktopt completion zsh > ~/.zsh/_ktopt, where ~/.zsh is in $fpath",
    "fish": "ktopt completion fish > ~/.config/fish/completions/ktopt.fish",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="; ".join(f"{shell}: {where}" for shell, where in _WHERE.items()))


def run(args: argparse.Namespace) -> int:
    from ktopt.cli import shells

    sys.stdout.write({"bash": shells.bash, "zsh": shells.zsh, "fish": shells.fish}[args.shell](commands()))
    return 0


@dataclass(frozen=True)
class Argument:
    """An option, or a positional argument where it has no names.

    names    as they are written: -m, --model
    help     one line
    value    what its value is called; "" for an option that takes none
    words    values that are known
    files    whether its value may be a path
    repeats  whether it can be given more than once
    """

    names: tuple[str, ...]
    help: str
    value: str = ""
    words: tuple[str, ...] = ()
    files: bool = False
    repeats: bool = False


@dataclass(frozen=True)
class CommandLine:
    """A command: its name, what it does, and its arguments."""

    name: str
    summary: str
    arguments: tuple[Argument, ...]


def commands() -> list[CommandLine]:
    """Every command, read from its argument parser."""
    from ktopt.cli import COMMANDS, parser_of

    found = []
    for name, command in COMMANDS.items():
        parser = parser_of(name, import_module(f"ktopt.cli.{command.module}"))
        arguments = tuple(_argument(name, action) for action in parser._actions if action.help != argparse.SUPPRESS)
        found.append(CommandLine(name, command.summary, arguments))
    return found


def _argument(command: str, action: argparse.Action) -> Argument:
    names = tuple(action.option_strings)
    help = " ".join((action.help or "").replace("%%", "%").split())
    if action.nargs == 0:
        return Argument(names, help)
    words = tuple(map(str, action.choices)) if action.choices else _known(command, action.dest)
    value = str(action.metavar or action.dest).upper()
    only_words = bool(action.choices) or (words and action.dest in ("codes", "name", "select", "ignore", "remap", "show"))
    repeats = isinstance(action, argparse._AppendAction) or action.nargs in ("+", "*")
    return Argument(names, help, value, words, not only_words and action.type is None, repeats)


def _known(command: str, dest: str) -> tuple[str, ...]:
    """The values of an argument that ktopt has a list of."""
    if dest == "model":
        from ktopt.models.shipped import known_models

        return known_models()
    if dest == "hardware":
        from ktopt.hardware import PRESETS

        return ("here", *PRESETS)
    if dest in ("rules", "show"):
        from ktopt.choosing.sets import shipped_rules

        return tuple(shipped_rules())
    if dest in ("codes", "select", "ignore"):
        from ktopt.codes import CLASSES, CODES

        return (*CLASSES, *CODES, "hardware") if dest == "codes" else (*CLASSES, *CODES)
    if (command, dest) == ("operators", "name"):
        from ktopt.registry import specs

        return tuple(spec.name for spec in specs())
    if (command, dest) == ("schema", "name"):
        from ktopt.cli.schema import schemas

        return tuple(sorted(schemas()))
    return ()
