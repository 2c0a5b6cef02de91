"""A picture as plain values: nodes and edges, which JSON and GraphML write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ktopt.folded import Group
from ktopt.picture.picture import Picture, bytes_elsewhere
from ktopt.plan import Plan
from ktopt.render.style import printable


def to_json(picture: Picture) -> str:
    """One JSON object: model, rules, devices, nodes, edges (docs/graph.md has the fields)."""
    devices = [
        {"name": d.name, "bytes": d.held_bytes, "by_kind": dict(d.nbytes), "memory_bytes": d.memory_bytes or None}
        for d in picture.devices
    ]
    data = {
        "model": picture.plan.model.source,
        "rules": picture.plan.rule_file,
        "context": picture.context,
        "devices": devices,
        "bytes_per_token": picture.transfer_bytes,
        "nodes": [{**node, "modules": list(group.paths)} for group, node in nodes(picture)],
        "edges": list(edges(picture)),
    }
    return json.dumps(data, indent=1) + "\n"


def to_graphml(picture: Picture) -> str:
    """GraphML, as networkx writes and reads it. What isn't known is left out."""
    import networkx

    graph: networkx.MultiDiGraph[str] = networkx.MultiDiGraph(
        model=_text(picture.plan.model.source), rules=_text(picture.plan.rule_file)
    )
    for _, node in nodes(picture):
        graph.add_node(_text(node["id"]), **_scalars(node, "id"))
    for edge in edges(picture):
        graph.add_edge(_text(edge["source"]), _text(edge["target"]), **_scalars(edge, "source", "target"))
    return "\n".join(networkx.generate_graphml(graph)) + "\n"


def nodes(picture: Picture) -> Iterator[tuple[Group, dict[str, Any]]]:
    """Each group and what is to be said of it. An id is the pattern of its paths; the root's is empty."""
    for group in picture.root.walk():
        yield group, _node(picture.plan, group)


def _node(plan: Plan, group: Group) -> dict[str, Any]:
    step = group.step
    rule = plan.rules[step.rule] if step.rule is not None else None
    return {
        "id": group.pattern,
        "name": group.name,
        "count": group.count,
        "class": step.cls,
        "role": step.role,
        "operator": step.operator,
        "device": step.generate_device,
        "replicas": list(step.replicas),
        "elsewhere": bytes_elsewhere(plan, group),
        "dtype": step.dtype,
        "bytes": group.own_nbytes,
        "bytes_with_children": group.nbytes,
        "rule": rule.id if rule else None,
        "rule_at": f"{rule.file}:{rule.line}" if rule else None,
    }


def edges(picture: Picture) -> Iterator[dict[str, Any]]:
    """Edges of the tree ("child"), then what passes between devices ("transfer")."""
    for group in picture.root.walk():
        for child in group.children:
            yield {"kind": "child", "source": group.pattern, "target": child.pattern}
    for edge in picture.edges:
        yield {
            "kind": "transfer",
            "source": edge.source.pattern,
            "target": edge.target.pattern,
            "side": edge.side,
            "from": edge.from_device,
            "to": edge.to_device,
            "count": edge.count,
            "bytes_per_token": edge.nbytes,
            "what": edge.what,
            "by_operator": edge.by_operator,
        }


def _scalars(values: dict[str, Any], *ends: str) -> dict[str, Any]:
    """The values as GraphML has them: text, numbers, true or false."""
    return {key: _scalar(value) for key, value in values.items() if key not in ends and value not in (None, [], {})}


def _scalar(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return ", ".join(value) if isinstance(value, list) else _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    """Text that XML can hold: without control characters."""
    return printable(text)
