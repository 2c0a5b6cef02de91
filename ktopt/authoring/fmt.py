"""The normal form of a rule file: one way to write each thing, with every comment kept. Behind `ktopt fmt`.

Keys stand in the order of rule_keys.py, two blanks indent a level, one blank line parts rules, and strings have quotes only where
YAML or the eye needs them: regexes always, in single quotes, so that a backslash is written once. What the file means never
changes; `format_text` reads its own result to be sure.
"""

from __future__ import annotations

from typing import Any

from ktopt.authoring.commented import Collection, Commented, Leaf, Member, read_commented
from ktopt.authoring.scalars import scalar
from ktopt.diagnostics import CompileError, KtoptError, Report
from ktopt.parse.compose import Budget, compose
from ktopt.source import Mapping, Node, Sequence, SourceFile
from ktopt.validate import keys

WIDTH = 100
"""A list or mapping in brackets stays on one line of at most so many characters."""

ORDER = {
    "top": ("version", "architectures", "import", "dtype", "default_device", "long_context", "kvc2", "let", "place", "rules"),
    "list rule": keys.LIST_RULE,
    "native rule": keys.NATIVE_RULE,
    "match": keys.MATCH,
    "replace": keys.REPLACE,
}
"""The keys of each kind of mapping, in normal order. Keys that aren't known come after these as they stood."""

SPACED = ("top", "top entry")
"""Where an author's blank lines between entries stay, several as one."""


def format_text(source: SourceFile) -> str:
    """The text in normal form; lines end as they did. CompileError where it can't be read, KtoptError where it is no rule file."""
    before = _readable(source)
    document = read_commented(source)
    comments = document.comments()
    text = _Writer(document).text()
    if "\r\n" in source.text:
        text = text.replace("\n", "\r\n")
    made = SourceFile(source.path, text)
    if not _same(before, comments, made):
        raise KtoptError(f"{source.path}: can't be brought into normal form without changing it; it is left as it was")
    return text


def _readable(source: SourceFile) -> Node | None:
    report = Report()
    root = compose(source, report, Budget())
    if report.errors:
        raise CompileError(report)
    if not _is_rule_file(root):
        raise KtoptError(
            f"{source.path}: not a rule file, which is a list of rules or a mapping with `rules:`; it is left as it was"
        )
    return root


def _is_rule_file(root: Node | None) -> bool:
    """Whether a file is one by its looks, so that other YAML in a folder stays as it is."""
    match root:
        case Sequence():
            return not root.items or any(
                isinstance(i, Mapping) and {k.value for k, _ in i} & {"match", "replace"} for i in root.items
            )
        case Mapping():
            return bool({key.value for key, _ in root} & {"version", "rules", "place", "let", "import"})
        case _:
            return root is None or root.value is None


def _same(before: Node | None, comments: list[str], made: SourceFile) -> bool:
    """Whether a new text has the meaning and the comments of the old one."""
    report = Report()
    after = compose(made, report, Budget())
    alike = not report.errors and _meaning(before, "root") == _meaning(after, "root")
    return alike and read_commented(made).comments() == comments


def _meaning(node: Node | None, context: str) -> Any:
    """A node's value with the order of what is ordered: every mapping's but those whose keys are sorted here."""
    match node:
        case Mapping():
            entries = [(str(k.value), repr(k.value), _meaning(v, inside(context, str(k.value)))) for k, v in node]
            return ("map", sorted(entries, key=lambda e: e[:2]) if context in ("root", *ORDER) else entries)
        case Sequence():
            return ("list", [_meaning(item, inside(context, "-")) for item in node.items])
        case _:
            return repr(node.value) if node is not None else repr(None)


def inside(context: str, key: str) -> str:
    """What stands at a key of a thing ("-" for an item of a list): which keys it has, and how it is written."""
    if context == "root":
        return "list rule" if key == "-" else _TOP.get(key, "top entry")
    return _INSIDE.get((context, key), "")


_TOP = {"rules": "rules"}
_INSIDE = {
    ("rules", "-"): "native rule",
    ("list rule", "match"): "match",
    ("list rule", "replace"): "replace",
    ("native rule", "match"): "match",
    ("native rule", "replace"): "replace",
    ("match", "name"): "regex",
}


class _Writer:
    def __init__(self, document: Commented) -> None:
        self.document = document

    def text(self) -> str:
        root = self.document.root
        lines = list(self.document.loose)
        if isinstance(root, Collection):
            if not root.members:
                lines = [*lines, *root.below, "{}" if root.mapping else "[]"]
            else:
                header = _take_header(root) if root.mapping else []
                above, body = self.block(root, "root")
                lines = [*header, *above, *body, *(["", *lines] if lines else [])]
                if root.prefix:
                    lines.insert(0, f"--- {root.prefix}")
        while lines and not lines[0]:
            del lines[0]
        while lines and not lines[-1]:
            del lines[-1]
        return "".join(f"{line}\n" for line in lines)

    def block(self, node: Collection, context: str) -> tuple[list[str], list[str]]:
        """A collection in lines, not indented: the comments above its first member, and the rest."""
        spaced = context in SPACED or (context == "root" and node.mapping)
        apart = context == "rules" or (context == "root" and not node.mapping)
        above: list[str] = []
        lines: list[str] = []
        for number, member in enumerate(_ordered(node, "top" if context == "root" and node.mapping else context)):
            comments, body = self.member(member, context)
            comments = comments if spaced or apart else [c for c in comments if c]
            if number == 0:
                above = comments
            else:
                lines += [""] if apart or (spaced and member.spaced) else []
                lines += comments
            lines += body
        below = node.below if spaced or apart else [c for c in node.below if c]
        return above, lines + below

    def member(self, member: Member, context: str) -> tuple[list[str], list[str]]:
        """A member's comments, and its own lines."""
        *more, beside = member.beside or [""]
        comments = [*member.above, *more]
        behind = f"  {beside}" if beside else ""
        within = inside(context, member.key.text if member.key else "-")
        start = "-" if member.key is None else f"{scalar(member.key, 'key')}{' ' if member.key.kind == 'alias' else ''}:"
        value = member.value
        if isinstance(value, Leaf):
            first, *rest = scalar(value, within).split("\n")
            return comments, [f"{start} {first}".rstrip() + behind, *_indent(rest)]
        assert value is not None
        brackets = self.brackets(value, within) if value.flow or not value.members else None
        if brackets is not None and (len(start) + len(brackets) < WIDTH or not value.members):
            return comments, [f"{start} {brackets}{behind}"]
        above, lines = self.block(value, within)
        if member.key is None:
            comments, behind = [*comments, *([beside] if beside else [])], ""
        if member.key is None and not value.prefix:
            return [*comments, *above], [f"- {lines[0]}", *_indent(lines[1:])]
        return comments, [f"{start} {value.prefix}".rstrip() + behind, *_indent([*above, *lines])]

    def brackets(self, node: Collection, context: str) -> str | None:
        """A collection on one line; None where a comment or a long text stands in it."""
        if context in ("rules", "root") and node.members:
            return None
        parts = []
        for member in _ordered(node, context):
            if member.above or member.beside:
                return None
            within = inside(context, member.key.text if member.key else "-")
            value = member.value
            text = self.brackets(value, within) if isinstance(value, Collection) else scalar(value, within) if value else ""
            if text is None or "\n" in text or (isinstance(value, Collection) and not value.flow):
                return None
            gap = " " if member.key is not None and member.key.kind == "alias" else ""
            parts.append(text if member.key is None else f"{scalar(member.key, 'key')}{gap}: {text or 'null'}")
        if any(node.below):
            return None
        prefix = f"{node.prefix} " if node.prefix else ""
        return prefix + ("{%s}" if node.mapping else "[%s]") % ", ".join(parts)


def _take_header(root: Collection) -> list[str]:
    """The comments at the top of a native file that belong to the file, not to its first key: all up to the last blank line, or
    else an editor's modeline."""
    first = root.members[0]
    blank = max((i for i, text in enumerate(first.above) if not text), default=-1)
    if blank < 0 and first.above and first.above[0].startswith("# yaml-language-server:"):
        blank = 0
    header, first.above = first.above[: blank + 1], first.above[blank + 1 :]
    first.spaced = first.spaced or bool(header)
    return header


def _ordered(node: Collection, context: str) -> list[Member]:
    """A mapping's entries in normal order. Where one uses an anchor that another sets, they stay as they are."""
    order = ORDER.get(context)
    leaves = list(node.leaves())
    if order is None or not node.mapping or any(leaf.kind == "alias" for leaf in leaves):
        return node.members
    places = {key: i for i, key in enumerate(order)}
    return sorted(node.members, key=lambda m: places.get(m.key.text if m.key else "", len(places)))


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]
