"""A plan as a table for people: repeated layers folded, sums per device, transfers, notes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ktopt.cli.table import Column, layout, wrap_path
from ktopt.cli.terminal import size
from ktopt.folding import fold_paths
from ktopt.plan import Plan, Step
from ktopt.plan_diff import device_bytes
from ktopt.render.style import PLAIN, Style, plural, printable

COLUMNS = (
    Column("modules"),
    Column("", right=True),
    Column("operator"),
    Column("op"),
    Column("device"),
    Column("bytes", right=True),
    Column("line", right=True, dim=True),
)
SHORT_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
MAX_TRANSFERS = 12
OPERATOR_WIDTH = 24


@dataclass
class Row:
    """Modules that a plan treats alike, folded to one pattern."""

    pattern: str
    count: int
    nbytes: int
    step: Step


def plan_table(plan: Plan, limit: int = 100, style: Style = PLAIN, *, everything: bool = False) -> str:
    """The plan in lines of at most `limit` columns. Modules without weights that no rule names are left out unless `everything`."""
    steps = plan.steps if everything else [s for s in plan.steps if s.rule is not None or s.weight_bytes]
    rows = fold_rows(steps, whole=not everything)
    parts = [_header(plan, style), layout(COLUMNS, [_cells(plan, row) for row in rows], limit, style)]
    hidden = len(plan.steps) - len(steps)
    if hidden:
        parts.append(style.paint(f"{plural(hidden, 'module')} without weights that no rule names: --all shows them", "dim"))
    parts += [_totals(plan, style), *_transfers(plan), *_notes(plan)]
    return "\n\n".join(part for part in parts if part) + "\n"


def fold_rows(steps: Iterable[Step], *, whole: bool = True) -> list[Row]:
    """Steps as rows in the order of the tree. With `whole`, what lies inside a `recursive: false` module counts as part of it."""
    by_path: dict[str, Step] = {}
    counts: dict[str, int] = {}
    for step in steps:
        home = step.inside if whole and step.inside else step.path
        by_path.setdefault(home, step)
        if home == step.path:
            by_path[home] = step
        counts[home] = counts.get(home, 0) + step.weight_bytes * (1 + len(step.replicas))
    alike: dict[Any, list[str]] = {}
    for path, step in by_path.items():
        alike.setdefault(_treatment(step), []).append(path)
    order = {path: i for i, path in enumerate(by_path)}
    rows = [
        Row(pattern.text or "(the model)", len(pattern.paths), sum(counts[p] for p in pattern.paths), by_path[pattern.paths[0]])
        for paths in alike.values()
        for pattern in fold_paths(paths)
    ]
    rows.sort(key=lambda row: order[row.step.path])
    return _join_siblings(rows)


def _treatment(step: Step) -> Any:
    """What makes modules alike: equal keys stand in one row."""
    runs = tuple((asked, op) for asked, (op, _) in step.runs.items())
    return (
        step.operator,
        step.rule,
        step.generate_device,
        step.prefill_device,
        step.dtype,
        step.replicas,
        _op(step),
        runs,
        step.inside,
        step.stored,
    )


def _join_siblings(rows: list[Row]) -> list[Row]:
    """Rows of one parent that differ in their last name only, as one: "mlp.{gate_proj,up_proj,down_proj}"."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        parent = row.pattern.rpartition(".")[0]
        groups.setdefault((parent, row.count, _treatment(row.step)) if parent else row.pattern, []).append(row)
    return [_joined(group) for group in groups.values()]


def _joined(rows: list[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    parent = rows[0].pattern.rpartition(".")[0]
    names = ",".join(row.pattern.rpartition(".")[2] for row in rows)
    return Row(f"{parent}.{{{names}}}", sum(r.count for r in rows), sum(r.nbytes for r in rows), rows[0].step)


def _op(step: Step) -> str:
    """The op that generates, and below it the one that runs in its place."""
    asked = step.kwargs.get("generate_op")
    if not isinstance(asked, str):
        return ""
    return f"{asked}\n>{step.runs[asked][0]}" if asked in step.runs else asked


def _cells(plan: Plan, row: Row) -> list[str]:
    step = row.step
    return [
        row.pattern,
        f"x{row.count:,}" if row.count > 1 else "",
        "\n".join(wrap_path(step.operator, OPERATOR_WIDTH)),
        "\n".join(filter(None, (_op(step), " ".join(step.stored)))),
        "\n".join((step.generate_device, *step.replicas)),
        size(row.nbytes) if row.nbytes else "-",
        str(plan.rules[step.rule].line) if step.rule is not None else "-",
    ]


def _header(plan: Plan, style: Style) -> str:
    where = f" on {plan.hardware}" if plan.hardware else ""
    dtype = SHORT_DTYPE.get(plan.dtype, plan.dtype)
    return (
        f"{style.paint(printable(plan.rule_file), 'bold')} for {style.paint(printable(plan.model.source), 'bold')}{where}, {dtype}"
    )


def _totals(plan: Plan, style: Style) -> str:
    modules = {d: sum(d in (s.generate_device, *s.replicas) and s.weight_bytes > 0 for s in plan.steps) for d in plan.devices}
    sums = device_bytes(plan)
    rows = [[d, plural(modules[d], "module"), size(sums.get(d, 0))] for d in sorted(plan.devices) if sums.get(d)]
    rows.append(["together", plural(sum(modules.values()), "module"), size(plan.weight_bytes)])
    return layout((Column("device"), Column("with weights", right=True), Column("bytes", right=True)), rows, 60, style)


def _transfers(plan: Plan) -> list[str]:
    """Transfers, alike ones folded."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for t in plan.transfers:
        groups.setdefault((t.source, t.target, t.side), []).append(t.path)
    lines = [
        f"  {source} -> {target} at the {side} of {pattern.text or 'the model'}"
        for (source, target, side), paths in groups.items()
        for pattern in fold_paths(paths)
    ]
    if not lines:
        return []
    more = (
        [f"  and {plural(len(lines) - MAX_TRANSFERS, 'more group')}: ktopt graph shows them"] if len(lines) > MAX_TRANSFERS else []
    )
    return [f"transfers ({len(plan.transfers)})\n" + "\n".join(lines[:MAX_TRANSFERS] + more)]


def _notes(plan: Plan) -> list[str]:
    by_note: dict[str, list[str]] = {}
    for step in plan.steps:
        for note in step.notes:
            by_note.setdefault(note, []).append(step.path)
    lines = [f"  {printable(note)}" for note in plan.notes]
    for note, paths in by_note.items():
        first, *others = [p.text for p in fold_paths(paths)]
        more = f" and {len(paths) - len(fold_paths(paths)[0].paths)} more" if others else ""
        lines.append(f"  {first}{more}: {printable(note)}")
    inactive = [f"{r.id} (line {r.line})" for r in plan.rules if not r.active]
    if inactive:
        lines.append(f"  inactive on this machine: {', '.join(inactive)}")
    return ["notes\n" + "\n".join(lines)] if lines else []
