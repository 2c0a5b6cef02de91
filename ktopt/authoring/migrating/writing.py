"""The text of a migrated file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ktopt.authoring.fmt import WIDTH, format_text
from ktopt.authoring.migrating.drafts import Draft
from ktopt.authoring.migrating.places import PlaceMap
from ktopt.authoring.migrating.remarks import tidy
from ktopt.authoring.migrating.selectors import write
from ktopt.authoring.migrating.trees import Tree
from ktopt.authoring.scalars import single, string
from ktopt.source import SourceFile

ROLE_IDS = {"linear": "linears", "norm": "norms", "causal_lm": "whole", "embedding": "embeddings"}


def native_text(
    path: str,
    header: Sequence[str],
    architectures: Iterable[str],
    places: PlaceMap,
    place_comments: Mapping[str, Sequence[str]],
    drafts: Sequence[Draft],
    left: Mapping[str, str],
    trees: Sequence[Tree],
    tail: Sequence[str],
) -> str:
    """The native file, in normal form.

    place_comments   comments for the lines of the map by device, and for the map itself under ""
    left             device -> selector of modules that the map has elsewhere than they have to be
    """
    lines = [*header, "version: 1", f"architectures: [{', '.join(architectures)}]"]
    if places.default:
        lines.append(f"default_device: {string(places.default)}")
    lines += [*tidy(place_comments.get("", ())), "place:"]
    for device, text in places.texts().items():
        lines += [f"  {comment}" for comment in place_comments.get(device, ())]
        lines.append(f"  {string(device, 'key')}: {string(text)}")
    lines += ["rules:"] * bool(drafts or left)
    for draft in drafts:
        lines += _rule(draft, trees)
    for device, text in left.items():
        lines.append("  # these lie elsewhere than the place map has them")
        lines += ["  - id: " + f"left-on-{device.replace(':', '-')}", f"    match: {string(text)}", "    replace: default"]
        lines.append(f"    kwargs: {{generate_device: {device}}}")
    indent = "  " * bool(drafts or left)
    lines += [f"{indent}{text}" if text else "" for text in tidy(tail)]
    return format_text(SourceFile(path, "\n".join(lines) + "\n"))


def _rule(draft: Draft, trees: Sequence[Tree]) -> list[str]:
    choice, first = draft.choice, draft.first
    entries = {"id": draft.id}
    if choice is None:
        clauses = [] if first.match.name is None else [f"name: {single(first.match.name)}"]
        clauses += [] if first.match.cls is None else [f"class: {first.match.cls}"]
        entries["match"] = f"{{{', '.join(clauses)}}}"
    else:
        entries["match"] = string(write(choice, trees))
    entries["replace"] = first.rule.replace.operator.name
    if draft.kwargs:
        entries["kwargs"] = inline(draft.kwargs)
    if not first.rule.recursive:
        entries["recursive"] = "false"
    comments = [f"  {text}" if text else "" for text in tidy(draft.remarks.above)]
    beside = draft.remarks.beside
    for key in [key for key in beside if key not in entries]:
        beside.setdefault("replace", []).extend(beside.pop(key))
    brief = f"  - {{{', '.join(f'{key}: {text}' for key, text in entries.items())}}}"
    if first.rule.recursive and not any(beside.values()) and len(brief) <= WIDTH:
        return [*comments, brief]
    rows = [f"{key}: {text}" + "".join(f"  {c}" for c in beside.get(key, ())) for key, text in entries.items()]
    return [*comments, f"  - {rows[0]}", *(f"    {row}" for row in rows[1:])]


def inline(value: Any) -> str:
    """A plain value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{inline(k)}: {inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return string(value) if isinstance(value, str) else str(value)


def name_drafts(drafts: Sequence[Draft], trees: Sequence[Tree]) -> None:
    """Give each draft an id: after the role of what it takes, or its path where it is one module."""
    used: set[str] = set()
    for draft in drafts:
        base = _id(draft, trees)
        number = 2
        draft.id = base
        while draft.id in used:
            draft.id = f"{base}-{number}"
            number += 1
        used.add(draft.id)


def _id(draft: Draft, trees: Sequence[Tree]) -> str:
    names: set[str] = set()
    roles: list[str] = []
    for old in draft.olds:
        for tree, wins in zip(trees, old.wins, strict=True):
            for module in (m for m in tree.graph.modules if tree.index.modules_at(wins) >> m.index & 1):
                names.add(module.name if module.layer is None and module.path else "")
                roles.append(module.role)
    if len(names) == 1 and "" not in names:
        return names.pop()
    role = max(roles, key=roles.count) if roles else "rule"
    return ROLE_IDS.get(role, role)
