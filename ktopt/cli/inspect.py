"""`ktopt inspect MODEL`: the module tree that rules select from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

from ktopt.cli.options import add_model
from ktopt.cli.table import Column, layout, tree_branches
from ktopt.cli.terminal import columns, style_of
from ktopt.diagnostics import UsageError
from ktopt.folding import fold_paths
from ktopt.graph import Module, ModuleGraph
from ktopt.render.style import plural, printable

COLUMNS = (Column("modules"), Column("", right=True), Column("class"), Column("tensors"), Column("parameters", right=True))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="MODEL",
        help="a shipped name, a folder, a config.json or a GGUF file; none lists the shipped names",
    )
    add_model(parser, weights=False)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--full", action="store_true", help="every module on a line of its own, with its classes and aliases")


def run(args: argparse.Namespace) -> int:
    from ktopt.trees import known_models, load_tree

    if args.name is not None and args.model is not None:
        raise UsageError(f"one model at a time: {args.name}, or --model {args.model}")
    name = args.model if args.name is None else args.name
    if name is None:
        names = list(known_models())
        print(
            json.dumps(names, indent=2)
            if args.format == "json"
            else "\n".join(["models whose trees ship with ktopt:", *("  " + n for n in names)])
        )
        return 0
    graph = load_tree(name)
    if args.format == "json":
        json.dump(tree_json(graph), sys.stdout, indent=1)
        print()
    elif args.full:
        print(_head(graph))
        for module in graph.modules:
            print(_full(module))
    else:
        print(_folded(graph))
    return 0


def tree_json(graph: ModuleGraph) -> dict[str, Any]:
    """The tree as plain values."""
    return {
        "name": graph.name,
        "model_type": graph.model_type,
        "architectures": list(graph.architectures),
        "digest": graph.digest,
        "modules": [
            {
                "path": m.path,
                "class": m.cls.name,
                "mro": list(m.cls.mro),
                "role": m.role,
                "layer": m.layer,
                "expert": m.expert,
                "tensors": [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "buffer": t.buffer} for t in m.tensors],
                "alias_paths": list(m.alias_paths),
                "alias_classes": list(m.alias_classes),
            }
            for m in graph.modules
        ],
    }


def _folded(graph: ModuleGraph) -> str:
    rows = _nested(_rows(graph))
    cells = [
        [
            label or "(the model)",
            f"x{len(row.paths):,}" if len(row.paths) > 1 else "",
            row.module.cls.simple_name,
            _shapes(row.module),
            _count(graph, row),
        ]
        for _, label, row in rows
    ]
    style = style_of(sys.stdout)
    branches = tree_branches([depth for depth, _, _ in rows], style)
    aliases = [line for _, _, row in rows for line in _aliases(graph, row)]
    parts = [_head(graph), layout(COLUMNS, cells, columns(sys.stdout), style, least=28, branches=branches)]
    if aliases:
        parts.append("rules may also name\n" + "\n".join(aliases))
    return "\n\n".join(parts)


class _Row(NamedTuple):
    """Modules of one class and shape, folded: the pattern of their paths, the paths, and the first of them."""

    text: str
    paths: tuple[str, ...]
    module: Module


def _rows(graph: ModuleGraph) -> list[_Row]:
    alike: dict[Any, list[str]] = {}
    for m in graph.modules:
        shapes = tuple((t.name, t.shape) for t in m.parameters)
        alike.setdefault((m.cls.name, shapes, m.alias_classes, bool(m.alias_paths)), []).append(m.path)
    rows = [_Row(p.text, p.paths, graph.by_path[p.paths[0]]) for paths in alike.values() for p in fold_paths(paths)]
    return sorted(rows, key=lambda row: row.module.index)


def _nested(rows: list[_Row]) -> list[tuple[int, str, _Row]]:
    """Rows under the row whose pattern theirs goes on from: (depth, what is left of the pattern, row)."""
    patterns = {row.text for row in rows}
    below: dict[str | None, list[_Row]] = {}
    for row in rows:
        below.setdefault(_ancestor(row.text, patterns), []).append(row)
    laid: list[tuple[int, str, _Row]] = []

    def lay(parent: str | None, depth: int) -> None:
        for row in below.get(parent, ()):
            laid.append((depth, row.text[len(parent) + 1 :] if parent else row.text, row))
            lay(row.text, depth + 1 if row.text else 0)

    lay(None, 0)
    return laid


def _ancestor(text: str, patterns: Collection[str]) -> str | None:
    if not text:
        return None
    parent = text
    while "." in parent:
        parent = parent.rpartition(".")[0]
        if parent in patterns:
            return parent
    return "" if "" in patterns else None


def _count(graph: ModuleGraph, row: _Row) -> str:
    """How many parameters a row's modules have that are no other module's tensor; "tied" where all are."""
    own = sum(t.numel for path in row.paths for t in graph.own_parameters(graph.by_path[path]))
    return "tied" if row.module.parameters and not own else _number(own)


def _aliases(graph: ModuleGraph, row: _Row) -> list[str]:
    text = row.text or "(the model)"
    names = [alias for path in row.paths for alias in graph.by_path[path].alias_paths]
    lines = [f"  {text} as {pattern.text}" for pattern in fold_paths(names)]
    packages: dict[str, list[str]] = {}
    for dotted in row.module.alias_classes:
        package, _, name = dotted.rpartition(".")
        packages.setdefault(package, []).append(name)
    for package, classes in packages.items():
        lines.append(f"  {text} as class {package}." + (classes[0] if len(classes) == 1 else "{" + ",".join(classes) + "}"))
    return lines


def _head(graph: ModuleGraph) -> str:
    total = sum(t.numel for m in graph.modules for t in graph.own_parameters(m))
    kind = ", ".join(graph.architectures) or graph.model_type or "no transformers model"
    counts = f"{plural(len(graph), 'module')}, {plural(graph.layer_count, 'layer')}, {_number(total)} parameters"
    return f"{printable(graph.name)}: {kind}, {counts}"


def _full(module: Module) -> str:
    lines = [f"{module.path or '(the model)'}  {module.cls.name}  {module.role}"]
    if module.parameters:
        lines.append(f"    tensors  {', '.join(f'{t.name} {t.dtype}{list(t.shape)}' for t in module.parameters)}")
    if module.alias_paths:
        lines.append(f"    also at  {', '.join(p.text for p in fold_paths(module.alias_paths))}")
    if module.alias_classes:
        lines.append(f"    also a   {', '.join(module.alias_classes)}")
    lines.append(f"    is a     {', '.join(module.cls.mro)}")
    return "\n".join(lines)


def _shapes(module: Module) -> str:
    """ "1536x576" for a lone weight; more tensors stand one below the other with their names."""
    shapes = {t.name: "x".join(map(str, t.shape)) for t in module.parameters}
    if list(shapes) == ["weight"]:
        return shapes["weight"]
    return "\n".join(f"{name} {shape}" for name, shape in shapes.items())


def _number(count: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count / limit:,.2f}{unit}"
    return str(count) if count else ""
