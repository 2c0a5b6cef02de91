"""`ktopt check`: what is wrong with rule files, with place and remedy."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from ktopt.checking import FileCheck, Target, check_file, unreadable
from ktopt.checking.settings import FAIL_ON, CodeFilter, Settings, SettingsFinder, check_prefixes
from ktopt.cli.findings import at_least, count, print_report
from ktopt.cli.options import (
    add_context,
    add_model,
    add_storage,
    add_target,
    compile_options,
    context_options,
    model_argument,
    rule_files,
    rules_argument,
    weights_exist,
)
from ktopt.cli.terminal import style_of
from ktopt.diagnostics import CompileError, Diagnostic, Severity, UsageError
from ktopt.parse import read_source
from ktopt.render import FOR_PEOPLE, FORMATS
from ktopt.render.style import plural
from ktopt.source import SourceFile
from ktopt.weights.source import WeightError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rules", nargs="+", metavar="RULES", help="rule files, folders of them, or - for standard input")
    add_model(parser, several=True)
    add_storage(parser)
    add_target(parser)
    add_context(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="default: full (with source lines), or github where GITHUB_ACTIONS=true",
    )
    parser.add_argument("--select", metavar="CODES", action="append", help="report these codes only: KT302, or KT3 for its class")
    parser.add_argument(
        "--ignore",
        metavar="CODES",
        action="append",
        help="leave these out, but errors that stop the plan; the longer of two prefixes decides",
    )
    parser.add_argument("--fail-on", choices=FAIL_ON, help="gravity from which findings make the exit code 1 (default: error)")
    parser.add_argument("--stdin-filename", metavar="NAME", help="what messages call standard input")
    parser.add_argument("--locked", action="store_true", help="fail where the plan differs from RULES.lock.json (see plan --lock)")
    parser.add_argument("--verbose", "-v", action="store_true", help="show infos too; json, jsonl, sarif and junit always do")
    parser.add_argument("--matrix", action="store_true", help="print how many modules each rule takes on each model")
    parser.add_argument("--watch", action="store_true", help="check again whenever a file changes")
    parser.set_defaults(asks_for_weights_itself=True)  # to say in the format asked for that there are none
    group = parser.add_argument_group("mending")
    group.add_argument("--fix", action="store_true", help="apply the fixes that are certain")
    group.add_argument("--unsafe-fixes", action="store_true", help="apply those too that guess what was meant (implies --fix)")
    group.add_argument("--diff", action="store_true", help="print what --fix would change, and write nothing")
    group.add_argument("--add-ignore", action="store_true", help="write `# ktopt: ignore[...]` at what is found")


def run(args: argparse.Namespace) -> int:
    _refuse_contradictions(args)
    session = Session(args)
    if args.watch:
        from ktopt.cli.watch import watch

        return watch(session)
    return session.once()


def _refuse_contradictions(args: argparse.Namespace) -> None:
    mending = args.fix or args.unsafe_fixes or args.diff
    stdin = "-" in args.rules
    for wrong, why in (
        (mending and args.add_ignore, "--add-ignore silences what --fix would mend; give one of them"),
        (args.matrix and (mending or args.add_ignore), "--matrix changes nothing; give it without --fix and --add-ignore"),
        (args.matrix and args.format not in (None, "full", "json"), "--matrix is printed as a table, or with --format json"),
        (args.watch and stdin, "--watch looks at files, and standard input is none"),
        (stdin and len(args.rules) > 1, "standard input (-) is checked alone, without other files"),
        (args.locked and args.storage, "--locked compares with a lock, which knows no --storage: give --weights to both"),
        (stdin and args.locked, "--locked compares with a file beside the rule file, and standard input has no place"),
        (stdin and args.add_ignore, "--add-ignore writes into files, and standard input is none"),
    ):
        if wrong:
            raise UsageError(why)


@dataclass
class Session:
    """One `ktopt check`: its arguments, and what it has read once for all files."""

    args: argparse.Namespace
    trees: dict[str, Any] = field(default_factory=dict)
    machines: dict[str | None, dict[str, Any]] = field(default_factory=dict)
    targets: dict[Settings, Target] = field(default_factory=dict)
    stdin: SourceFile | None = None
    finder: SettingsFinder = field(default_factory=SettingsFinder)
    texts: set[str] = field(default_factory=set)

    @property
    def read_paths(self) -> set[str]:
        """Every file that the last check looked at."""
        return self.texts | self.finder.paths

    def forget(self) -> None:
        """Before another round: settings may have changed since. Models and machines are kept."""
        self.targets.clear()

    def once(self) -> int:
        """Check every file, mend where asked to, print, and return the exit code."""
        args = self.args
        try:
            weights_exist(args)
            checks = self.check_all()
        except (UsageError, WeightError) as error:
            if not args.weights or self.format in FOR_PEOPLE or not _about_weights(error, args.weights):
                raise
            found = Diagnostic("KT703", Severity.ERROR, str(error), args.weights)
            print_report([found], sys.stdout, {args.weights: SourceFile(args.weights, "")}, self.format)
            return 1
        if args.matrix:
            from ktopt.cli.matrix import print_matrix

            print_matrix(checks, self.format)
        elif args.fix or args.unsafe_fixes or args.diff or args.add_ignore:
            from ktopt.cli.mending import mend

            return mend(self, checks)
        else:
            self.print(checks)
        return 1 if any(check.failing for check in checks) else 0

    def check_all(self) -> list[FileCheck]:
        """Every file's check, in the order given."""
        self.finder = SettingsFinder()
        files = [file for name in self.args.rules for file in rule_files(name)]
        if self.args.locked:
            _need_locks(files, self.args)
        checks = [self.check(name) for name in files]
        self.texts = {path for check in checks for path in (check.file, *check.sources)}
        imported = {os.path.realpath(path) for c in checks for path in c.sources if path != c.file}
        if imported:
            checks = [_as_imported(check) if os.path.realpath(check.file) in imported else check for check in checks]
        return checks

    def check(self, name: str) -> FileCheck:
        target = self.target(self.finder.of(self.args.stdin_filename or name if name == "-" else name))
        try:
            source = self.read(name)
        except CompileError as error:
            return unreadable(name, error.report.sorted(), target)
        return check_file(source, target)

    def read(self, name: str) -> SourceFile:
        """A file's text. Standard input can be read once only, and is kept."""
        if name != "-":
            rules = rules_argument(name)
            return rules if isinstance(rules, SourceFile) else read_source(rules)
        if self.stdin is None:
            rules = rules_argument(name, self.args.stdin_filename)
            assert isinstance(rules, SourceFile)
            self.stdin = rules
        return self.stdin

    def target(self, settings: Settings) -> Target:
        """What a file with these settings is checked on; the command line goes before them."""
        if settings not in self.targets:
            args = self.args
            fail_on = args.fail_on or settings.fail_on or "error"
            models = tuple((name, self.tree(name)) for name in self.models(settings))
            weights = {"weights": args.weights} if models and args.weights else {}
            self.targets[settings] = Target(
                models=models,
                options={**self.options(args.hardware or settings.hardware), **weights},
                codes=CodeFilter(
                    _codes(args.select, "--select", settings.select), _codes(args.ignore, "--ignore", settings.ignore)
                ),
                locked=args.locked,
                fail_on=None if fail_on == "never" else Severity(fail_on),
            )
        return self.targets[settings]

    def models(self, settings: Settings) -> list[str]:
        args = self.args
        given: list[str] = list(dict.fromkeys(args.model or ()))
        if not given:
            told = model_argument(argparse.Namespace(model=None, weights=args.weights), required=False)
            given = [told] if told is not None else list(settings.models or ())
        if args.weights and len(given) > 1:
            raise UsageError("--weights belong to one model; give one --model with them")
        if args.locked and len(given) != 1:
            raise UsageError("--locked compares the plan, which needs --model" + (", one only" if given else ""))
        if args.matrix and not given:
            raise UsageError("--matrix needs --model, once or several times, or [tool.ktopt] models")
        return given

    def tree(self, name: str) -> Any:
        if name not in self.trees:
            from ktopt.trees import load_tree

            self.trees[name] = load_tree(name)
        return self.trees[name]

    def options(self, hardware: str | None) -> dict[str, Any]:
        if self.args.context is not None and hardware is None:
            raise UsageError("--context is compared with what a machine has: which? Give --hardware")
        if hardware not in self.machines:
            args = argparse.Namespace(**{**vars(self.args), "hardware": hardware})
            self.machines[hardware] = {**compile_options(args), **context_options(args)}
        return self.machines[hardware]

    @property
    def format(self) -> str:
        """--format, or what suits where ktopt runs."""
        given: str | None = self.args.format
        return given or ("github" if os.environ.get("GITHUB_ACTIONS") == "true" else "full")

    def print(self, checks: list[FileCheck], stream: TextIO | None = None) -> None:
        """Print what was found, and for people a line that counts it."""
        stream = stream or sys.stdout
        found = list(dict.fromkeys(d for check in checks for d in check.diagnostics))
        sources = {path: source for check in checks for path, source in check.sources.items()}
        listed = [one for check in checks for one in check.checked]
        if self.format not in FOR_PEOPLE:
            print_report(found, stream, sources, self.format, listed)
            return
        shows_infos = self.args.verbose or any(check.target.fail_on is Severity.INFO for check in checks)
        shown = at_least(found, Severity.INFO if shows_infos else Severity.WARNING)
        print_report(shown, stream, sources, self.format, listed)
        gap = "\n" if shown and self.format == "full" else ""
        print(gap + summary(found, len(found) - len(shown), checks, style_of(stream)), file=stream)


def _about_weights(error: Exception, weights: str) -> bool:
    """Whether an error says that the weights given can't be read, which a program is told in the format that it asked for."""
    return isinstance(error, WeightError) or str(error).startswith((f"--weights {weights}", weights))


def _need_locks(files: Sequence[str], args: argparse.Namespace) -> None:
    """UsageError where a rule file has no lock: --locked has nothing to compare it with."""
    from ktopt.locking import lock_path

    for name in files:
        rules = rules_argument(name)
        if isinstance(rules, str) and os.path.isfile(rules) and not lock_path(rules).exists():
            model = f" --model {args.model[0]}" if args.model else " --model M"
            raise UsageError(f"--locked: {name} has no lock file; `ktopt plan {name}{model} --lock` writes {lock_path(rules).name}")


def _as_imported(check: FileCheck) -> FileCheck:
    return check if check.source is None else check_file(check.source, check.target, is_imported=True)


def _codes(given: list[str] | None, option: str, settings: tuple[str, ...] | None) -> tuple[str, ...]:
    """The code prefixes of an option, or of the settings where it isn't given."""
    if given is None:
        return settings or ()
    prefixes = tuple(part.strip() for text in given for part in text.split(",") if part.strip())
    check_prefixes(prefixes, option)
    return prefixes


def summary(found: list[Diagnostic], hidden: int, checks: list[FileCheck], style: Any) -> str:
    """The line at the end: what was found, what could be fixed, and what wasn't checked."""
    files = plural(len(checks), "file")
    grave = at_least(found, Severity.WARNING)
    if grave:
        worst = "red" if any(d.severity is Severity.ERROR for d in grave) else "yellow"
        text = style.paint(f"Found {count(grave)} in {files}", worst)
    else:
        text = style.paint(f"No problems in {files}", "green")
    if hidden:
        text += f", and {plural(hidden, 'info')} (-v shows them)"
    return f"{text}.{_fixable(found)}{_not_ignored(checks)}{_not_checked(checks)}"


def _not_ignored(checks: list[FileCheck]) -> str:
    """That errors are shown though --select or --ignore leave them out."""
    shown = sum(1 for c in checks for d in c.diagnostics if d.stops_plan and not c.target.codes.takes(d.code))
    return f" --select and --ignore don't hide what stops the plan ({plural(shown, 'error')})." if shown else ""


def _fixable(found: list[Diagnostic]) -> str:
    safe = sum(1 for d in found if d.fix is not None and d.fix.safe)
    unsafe = sum(1 for d in found if d.fix is not None and not d.fix.safe)
    if safe:
        return f" --fix mends {safe}" + (f", and --unsafe-fixes {unsafe} more." if unsafe else ".")
    return f" --unsafe-fixes mends {unsafe}." if unsafe else ""


def _not_checked(checks: list[FileCheck]) -> str:
    checks = [check for check in checks if not check.is_config]
    if not checks:
        return ""
    if not any(check.target.models for check in checks):
        return " Selection and placement are checked with --model only."
    stopped = sum(1 for c in checks if c.target.models and any(one.matches is None for one in c.compilations.values()))
    if not stopped:
        return ""
    return f" Selection and placement of {plural(stopped, 'file')} are checked once what stops the plan is mended."
