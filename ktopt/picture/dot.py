"""A picture as Graphviz text: groups as boxes coloured by device, thin edges to what is inside them, thick ones for transfers."""

from __future__ import annotations

from collections.abc import Iterator

from ktopt.folded import Group
from ktopt.picture.colours import Colour, colours
from ktopt.picture.picture import Picture
from ktopt.picture.words import devices_of, edge_text, group_text, moved, name_of, operator_of, times
from ktopt.plan import Plan
from ktopt.render.style import printable, size

TRANSFER_STYLE = 'color="#b91c1c", fontcolor="#b91c1c", penwidth=2, constraint=false'


def to_dot(picture: Picture) -> str:
    """Graphviz text, which `dot -Tsvg` draws. Nodes are called by their pattern, as in GraphML and JSON."""
    ground = colours([device.name for device in picture.devices])
    lines = [
        f"digraph {_quote(picture.plan.model.source or 'model')} {{",
        "  rankdir=LR;",
        f"  label={_quote(_legend(picture))}; labelloc=t; fontname=Helvetica;",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=10, fillcolor="#ffffff"];',
        '  edge [color="#9ca3af", arrowsize=0.6, fontname=Helvetica, fontsize=9];',
    ]
    lines += [_node(picture.plan, group, ground) for group in picture.root.walk()]
    lines += [f"  {_quote(above.pattern)} -> {_quote(group.pattern)};" for above, group in _inside(picture.root)]
    for edge in picture.edges:
        label = f"{edge.from_device} to {edge.to_device}\n{moved(edge)}"
        style = TRANSFER_STYLE + (", style=dashed" if edge.nbytes == 0 else "")
        lines.append(
            f"  {_quote(edge.source.pattern)} -> {_quote(edge.target.pattern)} "
            f"[label={_quote(label)}, tooltip={_quote(edge_text(edge))}, {style}];"
        )
    return "\n".join([*lines, "}"]) + "\n"


def _inside(group: Group) -> Iterator[tuple[Group, Group]]:
    for child in group.children:
        yield group, child
        yield from _inside(child)


def _node(plan: Plan, group: Group, ground: dict[str, Colour]) -> str:
    step = group.step
    label = [f"{name_of(group)} {times(group.count)}".strip(), operator_of(step)]
    if group.own_nbytes or step.operator != "default":
        label.append(devices_of(step))
    if group.nbytes:
        label.append(size(group.nbytes))
    fill = ""
    if len(used := _devices(group)) == 1 and (colour := ground.get(next(iter(used)))):
        fill = f', fillcolor="{colour.fill}", color="{colour.line}"'
    text, tip = _quote("\n".join(filter(None, label))), _quote("\n".join(group_text(plan, group)))
    return f"  {_quote(group.pattern)} [label={text}, tooltip={tip}{fill}];"


def _devices(group: Group) -> set[str]:
    """The devices that a group and all below it are on."""
    placed = (part.step for part in group.walk() if part.own_nbytes or part.step.operator != "default")
    return {device for step in placed for device in (step.generate_device, *step.elsewhere)}


def _legend(picture: Picture) -> str:
    held = [f"{device.name}: {size(device.held_bytes)}" for device in picture.devices]
    moving = picture.transfer_bytes
    total = f"{size(moving)} a token between devices" if moving else ""
    return "\n".join(filter(None, (picture.title, ", ".join(held), total)))


def _quote(text: str) -> str:
    """A quoted string of Graphviz, in which a backslash is one, and not the start of an escape such as \\N."""
    return '"' + printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
