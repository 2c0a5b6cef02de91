"""What a file's rules take on each model, in words: for hovering, for hints at the end of lines, and to find what shadows a rule.

While the text at hand doesn't compile, the last one that did answers, its lines moved to where they now stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lsprotocol import types

from ktopt.diagnostics import Report
from ktopt.lsp.analysis import Analysis
from ktopt.lsp.text import Text
from ktopt.match import Matches
from ktopt.pattern import PatternTimeout
from ktopt.render.style import plural
from ktopt.ruleset import Rule
from ktopt.selection import owners
from ktopt.selection.families import in_words
from ktopt.selector import Selector, parse_selector
from ktopt.source import Document, Node, Origin, Scalar, Sequence, Span
from ktopt.source import Mapping as YamlMapping
from ktopt.treeindex import members


@dataclass(frozen=True)
class Moved:
    """Where the lines of one text are in another, counted from 0: those before and after what was edited."""

    same_before: int = 0
    same_after: int = 0
    old_count: int = 0
    new_count: int = 0

    @classmethod
    def between(cls, old: Text, new: Text) -> Moved:
        a, b = ([text.line(n) for n in range(text.line_count)] for text in (old, new))
        most = min(len(a), len(b))
        before = next((i for i in range(most) if a[i] != b[i]), most)
        after = next((i for i in range(most - before) if a[-1 - i] != b[-1 - i]), most - before)
        return cls(before, after, len(a), len(b))

    def to_new(self, line: int) -> int | None:
        """The new text's line for one of the old; None where it was edited."""
        if line < self.same_before:
            return line
        return line + self.new_count - self.old_count if line >= self.old_count - self.same_after else None

    def to_old(self, line: int) -> int | None:
        if line < self.same_before:
            return line
        return line + self.old_count - self.new_count if line >= self.new_count - self.same_after else None


@dataclass(frozen=True)
class Known:
    """An analysis whose file compiled, and how its lines lie in the text at hand."""

    analysis: Analysis
    moved: Moved | None = None

    @classmethod
    def of(cls, now: Analysis, good: Analysis | None) -> Known:
        """The analysis itself where its file compiled, otherwise the last that did."""
        if now.ruleset is not None or good is None:
            return cls(now)
        return cls(good, Moved.between(good.shown.text, now.shown.text))

    def rule_at(self, line: int) -> Rule | None:
        """The rule on a line of the text at hand, from 0."""
        old = self.moved.to_old(line) if self.moved is not None else line
        return self.analysis.rule_at(self.analysis.shown.line_of(types.Position(old, 0))) if old is not None else None

    def line(self, span: Span) -> int | None:
        """The line, from 0, at which a span of the analysis begins in the text at hand; None where that was edited."""
        line = self.analysis.shown.range(span).start.line
        return self.moved.to_new(line) if self.moved is not None else line


@dataclass(frozen=True)
class Share:
    """What a rule takes on one model: the modules that it matches, those that it decides, and which rules took the rest.
    `active` is None where its condition asks about a machine that isn't known."""

    takes: int
    won: int
    lost_to: Mapping[int, int] = field(default_factory=dict)
    active: bool | None = True

    @property
    def lost(self) -> int:
        return self.takes & ~self.won


def share(rule: Rule, matches: Matches) -> Share:
    takes, won = matches.takes(rule.index), matches.won(rule.index)
    active = matches.active[rule.index]
    return Share(takes, won, owners(takes & ~won, matches) if active is not False else {}, active)


def label(rule: Rule, matches: Mapping[str, Matches]) -> str:
    """A rule's counts in a few words: "58 modules", "12 of 58 modules", or one for each model."""
    parts = [(name, _count(share(rule, m))) for name, m in matches.items()]
    if len(parts) == 1:
        return parts[0][1]
    return ", ".join(f"{name}: {text.removesuffix(' modules')}" for name, text in parts)


def _count(found: Share) -> str:
    if found.active is False:
        return "inactive"
    takes, won = found.takes.bit_count(), found.won.bit_count()
    text = plural(takes, "module") if won == takes else f"{won:,} of {plural(takes, 'module')}"
    return ("no modules" if not takes else text) + (", if `when` holds" if found.active is None else "")


def describe(rule: Rule, matches: Mapping[str, Matches]) -> str:
    """What a rule takes on each model, as Markdown: how many modules, which, and who took the rest."""
    name = f"rule {rule.number}" + ("" if rule.id == f"rule-{rule.number}" else f" ({rule.id})")
    lines = [f"**{name}**: {rule.replace.operator.name}", ""]
    for model, m in matches.items():
        found = share(rule, m)
        lines.append(f"- {model}: {_sentence(found)}")
        if found.active is False:
            continue
        won = [in_words(m.graph, members(found.won), most=6)] if found.won else []
        lines += [f"    - decides {text}" for text in won]
        for index, count in found.lost_to.items():
            other = m.ruleset.rules[index]
            closes = " and `recursive: false`" if index > rule.index else ""
            lines.append(f"    - {count:,} taken by rule {other.number} (line {other.origin.span.start.line}){closes}")
    if not matches:
        lines.append("Which modules it takes is known once there is a model: `[tool.ktopt] models` in pyproject.toml names some.")
    return "\n".join(lines)


def _sentence(found: Share) -> str:
    if found.active is False:
        return "inactive; its condition doesn't hold"
    if not found.takes:
        return "takes no module"
    takes, won = found.takes.bit_count(), found.won.bit_count()
    text = f"takes {plural(takes, 'module')}" + (f", decides {won:,}" if won != takes else "")
    return text + ("; whether its condition holds depends on the machine" if found.active is None else "")


def hints(known: Known) -> list[tuple[int, str]]:
    """For each rule, the line of its `match` in the text at hand, from 0, and its counts."""
    analysis = known.analysis
    nodes = {node.span: node for node in rule_nodes(analysis.document)}
    found = []
    for rule in analysis.rules if analysis.matches else ():
        node = nodes.get(rule.origin.span)
        key = node.key("match") if isinstance(node, YamlMapping) else None
        line = known.line(key.span) if key is not None else None
        if line is not None:
            found.append((line, label(rule, analysis.matches)))
    return found


def rule_nodes(document: Document | None) -> tuple[Node, ...]:
    """The nodes of a file's own rules."""
    root = document.root if document is not None else None
    listed = root.get("rules") if isinstance(root, YamlMapping) else root
    return listed.items if isinstance(listed, Sequence) else ()


def lets_of(document: Document | None) -> dict[str, tuple[str, Origin]]:
    """The selectors that `$name` may stand for in a file, its imports' and its own, and where each is written."""
    found: dict[str, tuple[str, Origin]] = {}
    if document is None:
        return found
    for imported in document.imports:
        found |= lets_of(imported)
    listed = document.root.get("let") if isinstance(document.root, YamlMapping) else None
    for key, value in listed if isinstance(listed, YamlMapping) else ():
        if isinstance(value, Scalar):
            found[str(key.value)] = (str(value.value), document.origin(key))
    return found


def selected(text: str, lets: Mapping[str, str], analysis: Analysis) -> str:
    """What a selector takes on each model, as Markdown; "" where it can't be read."""
    nowhere = Origin("", Span.at(1, 1))
    named: dict[str, Selector] = {}
    for name, written in lets.items():
        if (made := parse_selector(written, nowhere, named, Report())) is not None:
            named[name] = made
    selector = parse_selector(text, nowhere, named, Report())
    if selector is None:
        return ""
    lines = []
    for model, graph in analysis.graphs.items():
        try:
            taken = selector.evaluate(graph, analysis.target.options.get("hardware"))
        except PatternTimeout:
            continue
        words = f": {in_words(graph, members(taken), most=6)}" if taken else ""
        lines.append(f"- {model}: {plural(taken.bit_count(), 'module')}{words}")
    return "\n".join(lines)
