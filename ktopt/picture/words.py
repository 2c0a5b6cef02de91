"""What pictures say of a group: its name, what becomes of it, where, by which rule."""

from __future__ import annotations

from ktopt.folded import Group
from ktopt.picture.edges import Edge
from ktopt.plan import Plan, Step
from ktopt.render.style import plural, printable, size


def name_of(group: Group) -> str:
    """Its name in its parent: "{3..60}", "experts"; "model" of the root, whatever the root's class."""
    return printable(group.name or "(the model)")


def pattern_of(group: Group) -> str:
    return printable(group.pattern or "(the model)")


def operator_of(step: Step) -> str:
    """The operator with its op, or the class of a module that stays as it is."""
    if step.operator == "default":
        return printable(step.cls.rpartition(".")[2])
    op = step.kwargs.get("generate_op")
    running = step.runs[op][0] if isinstance(op, str) and op in step.runs else op
    return printable(f"{step.operator} ({running})" if isinstance(running, str) else step.operator)


def devices_of(step: Step) -> str:
    return ", ".join(step.held_bytes)


def rule_of(plan: Plan, step: Step) -> str:
    """ "rules.yaml:12 (rule experts)"; "" where no rule took it."""
    return printable(plan.blame(step)) if step.rule is not None else ""


def bytes_of(group: Group) -> str:
    return size(group.nbytes) if group.nbytes else ""


def times(count: int) -> str:
    """ "×58"; "" for one."""
    return f"×{count:,}" if count > 1 else ""


def moved(edge: Edge) -> str:
    """What an edge moves for a token: "14.3 kB ×58", "nothing new", "? ×3"."""
    if edge.nbytes == 0:
        return "nothing new"
    each = "?" if edge.nbytes is None else size(edge.nbytes / edge.moving)
    return f"{each} {times(edge.moving)}".strip()


def edge_text(edge: Edge) -> str:
    """An edge in full, for a tooltip."""
    where = edge.target.pattern if edge.side == "input" else edge.source.pattern
    total = "bytes not known" if edge.nbytes is None else f"{size(edge.nbytes)} a token"
    by_whom = ", by its operator" if edge.by_operator else ""
    return printable(
        f"{edge.side} of {where or 'the model'}: {edge.from_device} to {edge.to_device}, {plural(edge.count, 'transfer')}, "
        f"{total}: {edge.what}{by_whom}"
    )


def group_text(plan: Plan, group: Group) -> list[str]:
    """All that a tooltip says of a group, a line each."""
    step = group.step
    lines = [pattern_of(group) + (f" ({plural(group.count, 'module')})" if group.count > 1 else "")]
    lines.append(printable(step.cls) or "container")
    if step.operator != "default":
        lines.append(operator_of(step))
    if step.rule is not None:
        lines.append(rule_of(plan, step))
    if group.own_nbytes or step.operator != "default":
        kept = f"{' '.join(step.stored)} as stored" if step.stored else step.dtype
        lines.append(f"{devices_of(step)}, {kept}")
    if group.nbytes:
        lines.append(f"{size(group.nbytes)} ({group.nbytes:,} bytes)")
    return lines
