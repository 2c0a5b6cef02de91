"""What differs between two plans, in words for a terminal: the devices' totals, and under each rule the modules that changed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from textwrap import wrap
from typing import Any

from ktopt.choosing.sets import called
from ktopt.cli.table import Column, layout, wrap_path
from ktopt.folding import fold_names
from ktopt.plan import Plan, RuleRef
from ktopt.plan_diff import AUTOMATIC, DEVICES, Change, Field, PlanDiff, RuleChanges
from ktopt.render.style import PLAIN, Style, one_line, plural, printable, size, width

MANY = 3
"""So many changes to or from different devices, and otherwise alike, are told as one."""
_COUNT = re.compile(r" (?=x\d|[kMGT]?B\b)")
COLOURS = {"-": "red", "+": "green", "~": "yellow", "=": "dim"}


def diff_text(difference: PlanDiff, a: Plan, b: Plan, limit: int = 100, style: Style = PLAIN) -> str:
    """The difference in lines of at most `limit` columns."""
    elsewhere = sum(len(change.paths) for rule in difference.rules for change in rule.changes if not change.fields)
    if difference.empty:
        more = f"; {plural(elsewhere, 'module')} {'is' if elsewhere == 1 else 'are'} decided by other rules" if elsewhere else ""
        return f"the plans do not differ{more}\n"
    parts = [_head(difference, a, b, limit, style)]
    short = _short_names({rule.file for plan in (a, b) for rule in plan.rules})
    parts += [_section(_title(rule, short), _entries(rule.changes), limit, style) for rule in difference.rules]
    for sign, plan, paths in (("-", a, difference.only_a), ("+", b, difference.only_b)):
        which = (
            ("the first plan", "the second")[sign == "+"]
            if a.rule_file == b.rule_file
            else printable(called(plan.rule_file, plan.model.source))
        )
        parts.append(_section(f"only in {which}", (f"{sign} {line}" for line in _tops(paths)), limit, style))
    parts.append(_section("transfers", map(str, difference.transfers), limit, style))
    parts.append(_section("settings", (f"~ {setting}" for setting in difference.settings), limit, style))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(difference: PlanDiff, a: Plan, b: Plan, limit: int, style: Style) -> str:
    """Which plans, and what each device holds in both."""
    files = [printable(called(plan.rule_file, plan.model.source)) for plan in (a, b)]
    models = [printable(plan.model.source) for plan in (a, b)]
    if models[0] == models[1]:
        named = f"{' -> '.join(dict.fromkeys(files))}, for {models[0]}"
    else:
        named = " -> ".join(f"{file} for {model}" for file, model in zip(files, models, strict=True))
    columns = (Column("device"), Column("before", right=True), Column("after", right=True), Column("", right=True))
    rows = [[device, size(x), size(y), _grown(y - x)] for device, x, y in sorted(difference.devices)]
    lines = [style.paint(line, "bold") for line in wrap(named, limit, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(lines) + "\n\n" + layout(columns, rows, 80, style)


def _grown(by: int) -> str:
    return f"{'+' if by > 0 else '-'}{size(abs(by))}" if by else ""


def _short_names(files: Collection[str]) -> dict[str, str]:
    """Of each file as few last parts of its path as tell them all apart."""
    parts = {file: PurePath(file).parts for file in files}
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        short = {file: "/".join(each[-count:]) for file, each in parts.items()}
        if len(set(short.values())) == len(files):
            return short
    return {file: file for file in files}


def _title(rule: RuleChanges, short: Mapping[str, str]) -> str:
    """The rule in both plans, or before and after."""
    before, after = rule.before, rule.after
    if rule.same and (before is None or after is None):
        return "no rule"
    places = [f"{short[each.file]}:{each.line}" if each else "" for each in (before, after)]
    if before and after and rule.same:
        return f"{' -> '.join(dict.fromkeys((_named(before), _named(after))))} ({' -> '.join(dict.fromkeys(places))})"
    named = [
        f"{_named(each)} ({place}{', only there' if alone else ''})" if each else "no rule"
        for each, place, alone in zip((before, after), places, (rule.gone, rule.new), strict=True)
    ]
    return " -> ".join(named)


def _named(rule: RuleRef) -> str:
    return rule.id if AUTOMATIC.fullmatch(rule.id) else f"rule {rule.id}"


def _entries(changes: Iterable[Change]) -> Iterator[str]:
    """Changes in words; those that differ in where modules move from or to alone are one where they are many."""
    alike: dict[Any, list[Change]] = {}
    for change in changes:
        move = change.move
        rest = [(f.name, f.name != "weight_bytes" and repr(f)) for f in change.fields if f.name not in DEVICES]
        alike.setdefault(tuple(rest) if move else id(change), []).append(change)
    for group in alike.values():
        if len(group) < MANY:
            yield from map(_entry, group)
        else:
            yield _entry(*_together(group))


def _together(changes: Sequence[Change]) -> tuple[Change, str]:
    """Many moves as one change, and the moves in words: "device cuda:0 -> cuda:1 x7, cuda:2 x7"."""
    moves = [(each.move.before, each.move.after, len(each.paths)) for each in changes if each.move]
    sources, targets = ({move[side] for move in moves} for side in (0, 1))
    if len(sources) == 1:
        told = f"{moves[0][0]} -> {', '.join(f'{after} x{count:,}' for _, after, count in moves)}"
    elif len(targets) == 1:
        told = f"{', '.join(f'{before} x{count:,}' for before, _, count in moves)} -> {moves[0][1]}"
    else:
        told = ", ".join(f"{before} -> {after} x{count:,}" for before, after, count in moves)
    sizes = [f for each in changes for f in each.fields if f.name == "weight_bytes"]
    together = (Field("weight_bytes", sum(f.before for f in sizes), sum(f.after for f in sizes)),) if sizes else ()
    fields = (*(f for f in changes[0].fields if f.name != "weight_bytes"), *together)
    paths = tuple(path for each in changes for path in each.paths)
    return Change(paths, fields, sum(each.nbytes for each in changes)), f"device {told}"


def _entry(change: Change, move: str = "") -> str:
    """ "~ modules x58: device cuda:0 -> cpu; 1.3 TB". `move` is said in place of the change's own."""
    groups, count = change.modules, len(change.paths)
    told = f" x{count:,}" if count > len(groups) == 1 else f" ({count:,} in all)" if len(groups) > 1 else ""
    names = f"{', '.join(groups)}{told}"
    if not change.fields:
        return f"= {names}: as before"
    sizes = next((f for f in change.fields if f.name == "weight_bytes"), None)
    words = replace(change, fields=tuple(f for f in change.fields if f is not sizes)).words()
    words = [move if move and word == str(change.move) else word for word in words]
    if sizes is not None:
        words.append(f"{size(sizes.before)} -> {size(sizes.after)}")
    elif change.nbytes:
        words.append(size(change.nbytes))
    return f"~ {names}: {'; '.join(words)}"


def _tops(paths: Sequence[str]) -> list[str]:
    """Modules of one plan alone, without those below another one of them."""
    there = set(paths)
    below = [path for path in paths if path and path.rpartition(".")[0] in there]
    parents = {path.rpartition(".")[0] for path in below}
    tops = there.difference(below)
    bare, full = ([path for path in paths if path in tops and (path in parents) is has] for has in (False, True))
    return [*fold_names(bare), *(f"{name} and all below" for name in fold_names(full))]


def _section(title: str, lines: Iterable[str], limit: int, style: Style) -> str:
    """A title, and its lines in their colours; "" without lines."""
    found = [piece for line in lines for piece in _wrapped(one_line(line), limit, style)]
    return "\n".join([style.paint(one_line(title), "bold"), *found]) if found else ""


def _wrapped(line: str, limit: int, style: Style) -> list[str]:
    """A line; where it is too long, what stands after its modules on lines of its own, further in."""
    colour = COLOURS[line[0]]
    names, colon, rest = line.partition(": ")
    if not colon:
        return [style.paint(each, colour) for each in _filled(line, limit, 2)]
    if width(line) + 2 <= limit:
        return [f"  {style.paint(names + ':', colour)} {rest}"]
    return [*(style.paint(each, colour) for each in _filled(names, limit, 2)), *_filled(rest, limit, 6)]


def _filled(text: str, limit: int, indent: int) -> list[str]:
    """Indented lines; what is too long for one is broken as a path is, and a count or a unit stays with its word."""
    before, room = " " * indent, limit - indent - 2
    words = (piece for word in text.split(" ") for piece in wrap_path(word, room, 0))
    joined = _COUNT.sub("\N{NO-BREAK SPACE}", " ".join(words))
    lines = wrap(joined, limit, initial_indent=before, subsequent_indent=before + "  ", break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
