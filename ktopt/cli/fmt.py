"""`ktopt fmt`: rule files in their normal form, comments kept."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from ktopt.authoring.fmt import format_text
from ktopt.cli.findings import print_report
from ktopt.cli.options import rule_files
from ktopt.cli.terminal import style_of
from ktopt.diagnostics import CompileError, KtoptError, UsageError
from ktopt.parse import read_source
from ktopt.render.style import plural, printable
from ktopt.source import SourceFile


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="rule files, folders of them, or - for standard input")
    parser.add_argument("--check", action="store_true", help="write nothing; name the files that aren't in normal form")
    parser.add_argument("--diff", action="store_true", help="write nothing; show what would change")


def run(args: argparse.Namespace) -> int:
    files = [file for name in args.files for file in rule_files(name)]
    changed = failed = 0
    for name in files:
        try:
            source = read_source(name)
            made = format_text(source)
        except CompileError as error:
            failed += 1
            print_report(error.report.sorted(), sys.stderr)
            continue
        except KtoptError as error:
            failed += 1
            print(f"{style_of(sys.stderr).paint('error:', 'red')} {error}", file=sys.stderr)
            continue
        changed += made != source.text
        _settle(args, source, made)
    if files != ["-"]:
        print(_summary(len(files), changed, failed, args.check or args.diff), file=sys.stderr)
    return 1 if failed or (changed and (args.check or args.diff)) else 0


def _settle(args: argparse.Namespace, source: SourceFile, made: str) -> None:
    """Write the result, or show it."""
    if args.diff:
        _print_diff(source, made)
    elif args.check:
        if made != source.text:
            print(f"{printable(source.path)} is not in normal form")
    elif source.path == "-":
        sys.stdout.write(made)
    elif made != source.text:
        try:
            Path(source.path).write_bytes(made.encode())
        except OSError as error:
            raise UsageError(f"{source.path}: can't be written: {error.strerror}") from None
        print(f"wrote {printable(source.path)}", file=sys.stderr)


def _print_diff(source: SourceFile, made: str) -> None:
    style = style_of(sys.stdout)
    colours = {"-": "red", "+": "green", "@": "cyan"}
    lines = difflib.unified_diff(source.text.splitlines(), made.splitlines(), source.path, source.path, lineterm="")
    for line in lines:
        print(style.paint(printable(line), colours[line[0]]) if line[:1] in colours else printable(line))


def _summary(files: int, changed: int, failed: int, dry: bool) -> str:
    verb = "would change" if dry else "changed"
    parts = [f"{plural(changed, 'file')} {verb}", f"{plural(files - changed - failed, 'file')} in normal form already"]
    if failed:
        parts.append(f"{plural(failed, 'file')} left as it was" if failed == 1 else f"{plural(failed, 'file')} left as they were")
    return ", ".join(parts)
