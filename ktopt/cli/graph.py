"""`ktopt graph`: a plan as a graph of modules, with the device transfers as edges."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ktopt.cli.options import add_force, add_model, add_target, model_argument, rules_argument, stage_options, write_text
from ktopt.cli.plan import show_findings
from ktopt.cli.terminal import size
from ktopt.compiler import run_stages
from ktopt.diagnostics import UsageError
from ktopt.plan import Plan, Step, Transfer

PALETTE = ("#dbeafe", "#dcfce7", "#fef9c3", "#fee2e2", "#f3e8ff", "#ffedd5", "#cffafe", "#fce7f3", "#e5e7eb")
TRANSFER_STYLE = 'color="#dc2626", fontcolor="#dc2626", penwidth=2, constraint=false'


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rules", metavar="RULES", help="a rule file, or a plan.json")
    add_model(parser)
    add_target(parser)
    add_force(parser)
    parser.add_argument("--format", choices=("dot", "json", "svg", "html"), default="dot", help="svg and html: not in this version")
    parser.add_argument("--output", "-o", metavar="FILE", default="-", help="where to write it (default: standard output)")


def run(args: argparse.Namespace) -> int:
    if args.format in ("svg", "html"):
        raise UsageError(
            f"--format {args.format} is not in this version; --format dot is, and graphviz draws it: dot -Tsvg graph.dot"
        )
    plan = _plan(args)
    if plan is None:
        return 1
    write_text(args.output, to_dot(plan) if args.format == "dot" else json.dumps(to_json(plan), indent=1) + "\n")
    return 0


def _plan(args: argparse.Namespace) -> Plan | None:
    if args.rules.endswith(".json"):
        from ktopt.plan_check import open_plan

        return open_plan(args.rules, args.force)
    compilation = run_stages(rules_argument(args.rules), model_argument(args), **stage_options(args))
    show_findings(compilation)
    return compilation.plan


def to_json(plan: Plan) -> dict[str, Any]:
    """Nodes (modules with operator, device and bytes) and edges, which are of the tree ("child") or transfers ("transfer")."""
    nodes = [
        {
            "id": s.path,
            "class": s.cls,
            "role": s.role,
            "operator": s.operator,
            "device": s.generate_device,
            "replicas": list(s.replicas),
            "bytes": s.weight_bytes,
            "rule": plan.rules[s.rule].id if s.rule is not None else None,
        }
        for s in plan.steps
    ]
    edges: list[dict[str, Any]] = [{"kind": "child", "source": _parent(s), "target": s.path} for s in plan.steps if s.path]
    edges += [
        {"kind": "transfer", "source": source, "target": target, "side": t.side, "from": t.source, "to": t.target}
        for t in plan.transfers
        for source, target in [_ends(t)]
    ]
    return {"model": plan.model.source, "rules": plan.rule_file, "nodes": nodes, "edges": edges}


def to_dot(plan: Plan) -> str:
    """Graphviz text: modules coloured by device; transfers are thick, labelled edges. What lies inside a `recursive: false` module
    is not drawn."""
    colours = {device: PALETTE[i % len(PALETTE)] for i, device in enumerate(sorted(plan.devices))}
    lines = [
        f"digraph {_quote(plan.model.source or 'model')} {{",
        "  rankdir=LR;",
        '  node [shape=box, style=filled, fontname="Helvetica", fontsize=10];',
        '  edge [color="#9ca3af", arrowsize=0.6];',
    ]
    drawn = {s.path for s in plan.steps if not s.inside}
    lines += [
        f"  {_quote(s.path)} [label={_quote(_label(s))}, fillcolor={_quote(colours[s.generate_device])}];"
        for s in plan.steps
        if s.path in drawn
    ]
    lines += [f"  {_quote(_parent(s))} -> {_quote(s.path)};" for s in plan.steps if s.path and s.path in drawn]
    for t in plan.transfers:
        source, target = _ends(t)
        if source in drawn and target in drawn:
            lines.append(f"  {_quote(source)} -> {_quote(target)} [label={_quote(f'{t.source} to {t.target}')}, {TRANSFER_STYLE}];")
    return "\n".join([*lines, "}"]) + "\n"


def _ends(t: Transfer) -> tuple[str, str]:
    """The modules that a transfer goes between: what made the tensors, and where they enter (an output goes to the parent)."""
    if t.side == "output":
        return t.path, t.path.rpartition(".")[0]
    return t.after or t.path.rpartition(".")[0], t.path


def _parent(step: Step) -> str:
    return step.path.rpartition(".")[0]


def _label(step: Step) -> str:
    name = step.path.rpartition(".")[2] or "model"
    what = step.operator if step.operator != "default" else step.cls.rpartition(".")[2]
    weight = f", {size(step.weight_bytes)}" if step.weight_bytes else ""
    return f"{name}\n{what}\n{', '.join((step.generate_device, *step.replicas))}{weight}"


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
