"""A plan for people: its modules as a folded tree, sums per device, transfers, notes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import PurePath
from textwrap import wrap
from typing import NamedTuple

from ktopt.choosing.sets import called
from ktopt.cli.plan_rows import Row, rows_of
from ktopt.cli.table import LEAST, Column, layout, room, tree_branches, wrap_path
from ktopt.cli.terminal import size
from ktopt.folded import fold_plan
from ktopt.folding import fold_paths
from ktopt.plan import Plan, Step
from ktopt.plan_diff import device_bytes
from ktopt.render.style import PLAIN, Style, one_line, plural, printable, width

SHORT_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
MAX_TRANSFERS = 12
NAME_WIDTH = 16
"""A name's room beside the lines of the tree, at least."""


class Form(NamedTuple):
    """How a row is laid out: with the op beside its operator or below it, with rules' ids or only their lines, and how many columns
    operators and rules may take before they are broken."""

    op_beside: bool
    ids: bool
    operator: int
    rule: int


FORMS = (Form(True, True, 24, 18), Form(False, True, 24, 18), Form(False, True, 21, 14), Form(False, False, 21, 14))
"""From the widest to the narrowest. The first two are for names that aren't broken in them."""


def plan_table(plan: Plan, limit: int = 100, style: Style = PLAIN, *, everything: bool = False) -> str:
    """The plan in lines of at most `limit` columns. Modules without weights that no rule names are left out unless `everything`."""
    folded = fold_plan(plan, everything)
    parts = [_header(plan, limit, style), _tree(plan, rows_of(folded, everything), limit, style)]
    shown = set(chain.from_iterable(group.paths for group in folded.walk()))
    hidden = sum(step.rule is None and not step.weight_bytes and step.path not in shown for step in plan.steps)
    if hidden:
        parts.append(style.paint(f"{plural(hidden, 'module')} without weights that no rule names: --all shows them", "dim"))
    parts += [_totals(plan, style), *_transfers(plan, limit), *_notes(plan, limit)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _tree(plan: Plan, root: Row, limit: int, style: Style) -> str:
    """The rows in the widest form that leaves names their room."""
    branches = tree_branches(list(_depths(root)), style)
    names = [one_line(row.name) or "(the model)" for row in root.walk()]
    need = max(width(b.first) + width(name) for b, name in zip(branches, names, strict=True))
    least = max(LEAST, max(width(b.first) for b in branches) + NAME_WIDTH)
    for form in FORMS:
        columns = _columns(form)
        cells = [[name, *_cells(plan, row, form)] for name, row in zip(names, root.walk(), strict=True)]
        if room(columns, cells, limit) >= (max(need, least) if form in FORMS[:2] else least):
            break
    return layout(columns, cells, limit, style, least=least, branches=branches)


def _columns(form: Form) -> tuple[Column, ...]:
    return (
        Column("module"),
        Column("", right=True),
        Column("operator"),
        *((Column("op"),) if form.op_beside else ()),
        Column("device"),
        Column("size", right=True),
        Column("rule", dim=True) if form.ids else Column("line", right=True, dim=True),
    )


def _depths(row: Row, depth: int = 0) -> Iterator[int]:
    """How deep each row of the tree stands, in the order of Row.walk."""
    yield depth
    for below in row.rows:
        yield from _depths(below, depth + 1)


def _cells(plan: Plan, row: Row, form: Form) -> list[str]:
    """All cells of a row but the first."""
    step = row.step
    told = f"as {row.like}" + (", but for" if row.rows else "") if row.like else "" if row.holder else step.operator
    what, ops = wrap_path(told, form.operator), [] if row.holder else _ops(step)
    return [
        f"x{row.count:,}" if row.count > 1 else "",
        "\n".join(what if form.op_beside else [*what, *(f"  {op}" for op in ops)]),
        *(["\n".join(ops)] if form.op_beside else []),
        "\n".join(row.devices),
        size(row.nbytes) if row.nbytes else "-",
        _rule(plan, row, form),
    ]


def _ops(step: Step) -> list[str]:
    """The op that generates, the one that runs in its place, and the types that weights stay in."""
    asked = step.kwargs.get("generate_op")
    if not isinstance(asked, str):
        return list(step.stored)
    return [asked, *([f">{step.runs[asked][0]}"] if asked in step.runs else []), *([" ".join(step.stored)] if step.stored else [])]


def _rule(plan: Plan, row: Row, form: Form) -> str:
    """The rule's id and line, and its file where it is not the plan's own; lines alone where a row stands for a subtree."""
    rules = [plan.rules[number] for number in row.rules]
    if row.like:
        lines = ", ".join(str(rule.line) for rule in rules)
        return "\n".join(wrap(f"line{'s' * (len(rules) > 1)} {lines}" if form.ids and rules else lines, form.rule))
    if row.holder or not rules:
        return "" if row.holder else "-"
    (rule,) = rules
    if not form.ids:
        return str(rule.line)
    other = wrap_path(f"of {PurePath(rule.file).name}", form.rule) if rule.file != plan.rule_file else []
    return "\n".join([*wrap(f"{rule.id}:{rule.line}", form.rule), *other])


def _header(plan: Plan, limit: int, style: Style) -> str:
    where = f" on {plan.hardware}" if plan.hardware else ""
    said = f"{called(plan.rule_file, plan.model.source)} for {plan.model.source}{where}, {SHORT_DTYPE.get(plan.dtype, plan.dtype)}"
    lines = wrap(one_line(said), limit, break_long_words=False, break_on_hyphens=False)
    return "\n".join(style.paint(line, "bold") for line in lines)


def _totals(plan: Plan, style: Style) -> str:
    modules = {d: sum(s.held_bytes.get(d, 0) > 0 for s in plan.steps) for d in plan.devices}
    sums = device_bytes(plan)
    rows = [[d, plural(modules[d], "module"), size(sums.get(d, 0))] for d in sorted(plan.devices) if sums.get(d)]
    rows.append(["together", plural(sum(modules.values()), "module"), size(plan.weight_bytes)])
    return layout((Column("device"), Column("with weights", right=True), Column("size", right=True)), rows, 60, style)


def _transfers(plan: Plan, limit: int) -> list[str]:
    """Transfers, alike ones folded."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for t in plan.transfers:
        groups.setdefault((t.source, t.target, t.side), []).append(t.path)
    lines = [
        _paragraph(f"{source} -> {target} at the {side} of {pattern.text or 'the model'}", limit)
        for (source, target, side), paths in groups.items()
        for pattern in fold_paths(paths)
    ]
    if not lines:
        return []
    more = (
        [f"  and {plural(len(lines) - MAX_TRANSFERS, 'more group')}: ktopt graph shows them"] if len(lines) > MAX_TRANSFERS else []
    )
    return [f"transfers ({len(plan.transfers)})\n" + "\n".join(lines[:MAX_TRANSFERS] + more)]


def _notes(plan: Plan, limit: int) -> list[str]:
    by_note: dict[str, list[str]] = {}
    for step in plan.steps:
        for note in step.notes:
            by_note.setdefault(note, []).append(step.path)
    notes = [*plan.notes]
    for note, paths in by_note.items():
        first, *others = fold_paths(paths)
        more = f" and {len(paths) - len(first.paths)} more" if others else ""
        notes.append(f"{first.text}{more}: {note}")
    inactive = [f"{r.id} (line {r.line})" for r in plan.rules if not r.active]
    if inactive:
        notes.append(f"inactive on this machine: {', '.join(inactive)}")
    return ["notes\n" + "\n".join(_paragraph(note, limit) for note in notes)] if notes else []


def _paragraph(text: str, limit: int) -> str:
    """Indented lines of at most `limit` columns; a word that is longer than one is broken."""
    return "\n".join(wrap(printable(text), limit, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
