"""The command line: `ktopt COMMAND`. One file a command, imported only when it is the one asked for.

A command module has `configure(parser)`, which adds its arguments, and `run(args)`, which returns an exit code; EXIT_CODES says
what each means, and `ktopt --help` prints it.

Little is imported before `main` runs, so that Ctrl-C is answered quietly from the start.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

CLEAN, FINDINGS, USAGE, INTERNAL = 0, 1, 2, 3
INTERRUPTED, PIPE_CLOSED = 130, 141
EXIT_CODES = {
    CLEAN: "done, and nothing found that fails the run",
    FINDINGS: "something found: in rules (or they can't be read), between plans, in weights; or the machine refused (a full disk)",
    USAGE: "asked wrongly: unknown options or names (of a model, machine, device, module, operator, code), no place to write to",
    INTERNAL: "ktopt itself failed: please report it",
    INTERRUPTED: "interrupted by Ctrl-C",
    PIPE_CLOSED: "whoever read the output stopped reading",
}


class Command(NamedTuple):
    """A command: its module under ktopt.cli, one line on what it does, and an example that works in a checkout."""

    module: str
    summary: str
    example: str


_SMALL = "rules/smollm2/cpu.yaml --model smollm2-135m"
COMMANDS = {
    "check": Command("check", "find what is wrong with rule files", f"ktopt check {_SMALL}"),
    "plan": Command("plan", "show what each module becomes, where it lives, and its bytes", f"ktopt plan {_SMALL}"),
    "why": Command(
        "why", "say which rule of a file decided a module, and why the others didn't", f"ktopt why model.layers.3.mlp {_SMALL}"
    ),
    "diff": Command(
        "diff", "compare two plans", "ktopt diff rules/smollm2/cpu.yaml rules/smollm2/reference.yaml --model smollm2-135m"
    ),
    "apply": Command(
        "apply",
        "write a folder that transformers loads, with the plan beside it",
        "ktopt apply rules/smollm2/cpu.yaml --weights smollm2.gguf --out optimized",
    ),
    "run": Command(
        "run",
        "apply a rule file and answer a prompt",
        'ktopt run rules/smollm2/cpu.yaml --weights smollm2.gguf --prompt "What is a compiler?"',
    ),
    "chat": Command(
        "chat", "apply a rule file and talk with the model", "ktopt chat rules/smollm2/cpu.yaml --weights smollm2.gguf"
    ),
    "serve": Command(
        "serve",
        "apply a rule file and answer requests of OpenAI's API",
        "ktopt serve rules/smollm2/cpu.yaml --weights smollm2.gguf --port 10002",
    ),
    "bench": Command(
        "bench",
        "apply a rule file and measure prefill, decode and memory",
        "ktopt bench rules/smollm2/cpu.yaml --weights smollm2.gguf -p 512,4096 -n 64 -d 0,4096 -t 2",
    ),
    "inspect": Command("inspect", "show a model's module tree", "ktopt inspect deepseek-v3"),
    "rules": Command(
        "rules",
        "list the rule sets that ship, and say which suit a model and this machine",
        "ktopt rules --model qwen3-30b-a3b --hardware 1x24GB+64GB",
    ),
    "operators": Command("operators", "list the operators, or show one", "ktopt operators KTransformersLinear"),
    "graph": Command("graph", "draw a plan: modules, devices and transfers", f"ktopt graph {_SMALL} --format dot"),
    "doctor": Command("doctor", "say what this machine has that ktopt can use", "ktopt doctor"),
    "explain": Command("explain", "print the page of a finding's code, or of hardware files", "ktopt explain KT302"),
    "fmt": Command("fmt", "bring rule files into their normal form, comments kept", "ktopt fmt rules/smollm2/cpu.yaml --diff"),
    "init": Command(
        "init",
        "write a first rule file for a model on a machine",
        "ktopt init --model qwen3-30b-a3b --hardware 1x24GB -o rules.yaml",
    ),
    "place": Command(
        "place",
        "find where modules go on a machine, for the least time of a decoded token",
        "ktopt place rules/qwen3-moe/cpu.yaml --model qwen3-30b-a3b --hardware cpu+128GB",
    ),
    "profile": Command(
        "profile",
        "measure this machine into a hardware file, or count how often a model's experts are chosen",
        "ktopt profile -o machine.yaml",
    ),
    "migrate": Command(
        "migrate", "turn a list-form rule file into the native form", "ktopt migrate old.yaml --model deepseek-v3 -o new.yaml"
    ),
    "lsp": Command("lsp", "be a language server for rule files, which an editor starts", "ktopt lsp"),
    "schema": Command("schema", "print a JSON Schema, for editors", "ktopt schema ruleset"),
    "completion": Command("completion", "print a script that makes a shell complete ktopt", "ktopt completion bash"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises for what a user did. With KTOPT_TRACEBACK=1, internal errors raise."""
    try:
        return _answer(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        _ignore_interrupts()
        return INTERRUPTED


def _ignore_interrupts() -> None:
    """Let a second Ctrl-C not interrupt the interpreter's own ending, which would print a traceback."""
    import signal
    import threading

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer(arguments: list[str]) -> int:
    _mend_streams()
    drop_checkout_root()
    try:
        try:
            code = _dispatch(arguments)
        except SystemExit as stop:  # argparse, after it has printed help or what is wrong
            code = stop.code if isinstance(stop.code, int) else USAGE
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except Exception as error:
        return _failed(error, arguments)


def _failed(error: Exception, arguments: Sequence[str]) -> int:
    """Say what went wrong, and give the exit code."""
    from ktopt.diagnostics import CompileError, KtoptError, UsageError

    known = isinstance(error, KtoptError | OSError | MemoryError)
    if not known and os.environ.get("KTOPT_TRACEBACK"):
        raise error
    code = (USAGE if isinstance(error, UsageError) else FINDINGS) if known else INTERNAL
    try:
        if isinstance(error, CompileError):
            from ktopt.cli.findings import print_report

            print_report(error.report.sorted(), sys.stderr)
        elif isinstance(error, OSError):
            _drop_output()
            complain(os_error(error))
        elif known:
            complain(error if isinstance(error, KtoptError) else "there is not enough memory for this")
        else:
            _internal(error, arguments)
        sys.stderr.flush()
    except OSError:  # nobody hears it
        _drop_output(sys.stderr)
    return code


def os_error(error: OSError) -> str:
    """What the operating system refused, and of which file."""
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return "the working directory is gone"
    why = error.strerror or str(error) or type(error).__name__
    return f"{os.fsdecode(error.filename)}: {why}" if isinstance(error.filename, str | bytes) else why


def _mend_streams() -> None:
    """Give a closed standard stream a place to go, and let no character fail that a terminal can't show."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115


def _drop_output(stream: Any = None) -> None:
    """Send what a stream (standard output by default) still holds nowhere, so that the interpreter's own flush is quiet too."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())
    except (OSError, ValueError):  # a stream of a test's, which has no number
        return


def complain(error: object, code: int = FINDINGS) -> int:
    """Print "error: ..." to stderr and return `code`. Names from files may be in it, so it is made printable."""
    from ktopt.cli.terminal import style_of
    from ktopt.render.style import printable

    style = style_of(sys.stderr)
    print(f"{style.paint('error:', 'red')} {printable(str(error))}", file=sys.stderr)
    return code


def _internal(error: Exception, arguments: Sequence[str]) -> None:
    import shlex

    what = str(error) or "no message"
    complain(f"ktopt itself failed: {type(error).__name__}: {what}", INTERNAL)
    print(
        "This is a bug. Please report it with the traceback that this prints:\n"
        f"  KTOPT_TRACEBACK=1 ktopt {shlex.join(arguments)}\nand with what `ktopt doctor` says.",
        file=sys.stderr,
    )


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return CLEAN if arguments else USAGE
    if arguments[0] in ("-V", "--version"):
        from ktopt import __version__

        print(f"ktopt {__version__}")
        return CLEAN
    name, *rest = arguments
    if name not in COMMANDS:
        from ktopt.diagnostics import UsageError

        raise UsageError(_unknown_command(name))
    from importlib import import_module

    module: Any = import_module(f"ktopt.cli.{COMMANDS[name].module}")
    from ktopt.cli.options import check_arguments

    parser = parser_of(name, module)
    args = parser.parse_args(rest)
    check_arguments(parser, args)
    code: int = module.run(args)
    return code


def parser_of(name: str, module: Any) -> argparse.ArgumentParser:
    """The argument parser of a command."""
    import argparse

    from ktopt.cli.parsing import Parser

    command = COMMANDS[name]
    parser = Parser(
        prog=f"ktopt {name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog=f"example:\n  {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    return parser


def overview() -> str:
    """What `ktopt --help` prints."""
    lines = [
        "ktopt compiles rule files for transformers models: rules choose, module by module, what runs and where.",
        "",
        "usage: ktopt COMMAND ...        (ktopt COMMAND --help: its options and an example)",
        "",
        *(f"  {name:<11}{command.summary}" for name, command in COMMANDS.items()),
        "",
        "example:",
        f"  {COMMANDS['plan'].example}",
        "",
        "exit codes:",
        *(f"  {code:<5}{meaning}" for code, meaning in EXIT_CODES.items()),
    ]
    return "\n".join(lines)


def _unknown_command(name: str) -> str:
    from ktopt.operator import nearest

    near = nearest(name, COMMANDS)
    hint = f"did you mean `ktopt {near}`?" if near else f"commands are {', '.join(COMMANDS)}"
    return f"no command {name!r}; {hint}"


def drop_checkout_root() -> None:
    """Take the checkout's own root off sys.path, where `python -m ktopt` puts it: its kernels/ would be taken for the Hugging Face
    package of that name, which transformers probes. An installed ktopt has no such root."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    root = os.path.realpath(os.path.dirname(package))
    if os.path.isfile(os.path.join(root, "pyproject.toml")) and os.path.isdir(os.path.join(root, "kernels")):
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != root]
