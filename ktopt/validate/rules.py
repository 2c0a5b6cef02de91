"""One rule of either form: its match, its replacement and its flags."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from ktopt.diagnostics import Edit, Fix
from ktopt.pattern.check import RegexProblem, check_regex, class_as_number_range, literal_backslash
from ktopt.ruleset import NameClass, Replacement, Rule
from ktopt.source import Mapping, Node, Origin, Position, Scalar, Span
from ktopt.validate import keys
from ktopt.validate.lets import Lets
from ktopt.validate.replacement import KwargsReader, find_operator
from ktopt.validate.shape import Shape, kind_of

if TYPE_CHECKING:
    from ktopt.selector import Selector

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MATCH_EXAMPLE = r"""`match: {name: '^model\.layers\.', class: torch.nn.Linear}`"""


@dataclass
class RuleReader:
    """Reads the rule `node`. `later` is how many rules follow it in its file; `lets` are the named selectors of a native file."""

    shape: Shape
    node: Node
    index: int
    later: int
    native: bool
    lets: Lets

    def read(self) -> Rule | None:
        """The rule, or None with findings."""
        example = "`match:` and `replace:`"
        rule = self.shape.mapping(self.node, "a rule", example)
        if rule is None:
            return None
        known, elsewhere = (
            (keys.NATIVE_RULE, keys.NATIVE_RULE_ELSEWHERE) if self.native else (keys.LIST_RULE, keys.LIST_RULE_ELSEWHERE)
        )
        self.shape.keys(without_spilled(rule, known), known, elsewhere)
        match = self.match(rule)
        replace = self.replace(rule)
        when, expect = rule.get("when"), rule.get("expect") if self.native else None
        recursive = rule.get("recursive")
        takes_inside = True if recursive is None else self.shape.boolean(recursive, "recursive", True)
        count = self.shape.count(expect, "expect") if expect is not None else None
        condition = self.selector(when, "when") if when is not None and self.native else None
        if match is None or replace is None or (when is not None and condition is None):
            return None
        return Rule(
            index=self.index,
            id=self.identifier(rule),
            match=match,
            replace=replace,
            origin=self.origin(rule),
            match_origin=self.shape.origin(rule.get("match") or rule),
            recursive=takes_inside,
            when=condition,
            expect=count,
            expect_origin=self.shape.origin(expect) if expect is not None else None,
        )

    def origin(self, rule: Mapping) -> Origin:
        return self.shape.origin(rule)

    def identifier(self, rule: Mapping) -> str:
        node = rule.get("id") if self.native else None
        return str(node.value) if isinstance(node, Scalar) and node.value is not None else f"rule-{self.index + 1}"

    def first_line(self, rule: Mapping) -> Node:
        """The rule's first key: the rule's own span covers all its lines."""
        return rule.entries[0][0] if rule.entries else rule

    def match(self, rule: Mapping) -> NameClass | Selector | None:
        node = rule.get("match")
        if node is None:
            if self.shape.misspelt(rule, "match", keys.LIST_RULE):
                return None
            help = f"write {_MATCH_EXAMPLE}"
            self.shape.error(
                "KT203", "`match` is missing: the rule says not which modules it takes", self.first_line(rule), help=help
            )
            return None
        if self.native and isinstance(node, Scalar) and isinstance(node.value, str):
            return self.selector(node, "match")
        if not self.native and isinstance(node, Scalar) and isinstance(node.value, str):
            message = f"`match` must be a mapping, not {kind_of(node)}"
            help = f"selectors belong to the native form (`version: 1` and `rules:`); in a list write {_MATCH_EXAMPLE}"
            self.shape.error("KT206", message, node, help=help)
            return None
        example = '`match: "@model.layers.*.mlp"`' if self.native else _MATCH_EXAMPLE
        mapping = self.shape.mapping(node, "match", example)
        return None if mapping is None else self.name_class(mapping)

    def selector(self, node: Node, key: str) -> Selector | None:
        text = self.shape.text(node, key, f'`{key}: "class=Linear"`')
        if text is None or not isinstance(node, Scalar):
            return None
        return read_selector(self.shape.inside(key), node, text, self.lets, when=key == "when")

    def name_class(self, match: Mapping) -> NameClass | None:
        shape = self.shape.inside("match")
        shape.keys(match, keys.MATCH, keys.MATCH_ELSEWHERE)
        name, cls = match.get("name"), match.get("class")
        if name is None and cls is None:
            if all(key.value in keys.MATCH for key, _ in match):
                self.shape.error("KT203", "`match` needs `name`, `class`, or both", match, help=f"write {_MATCH_EXAMPLE}")
            return None
        pattern = shape.text(name, "name", r"`name: '^model\.layers\.'`") if name is not None else None
        dotted = shape.text(cls, "class", "`class: torch.nn.Linear`") if cls is not None else None
        good = pattern is not None or name is None
        if pattern is not None and isinstance(name, Scalar):
            good = check_name(self.shape, name, pattern)
        if dotted is not None and cls is not None and not _CLASS.fullmatch(dotted):
            help = "write its dotted name, such as torch.nn.Linear"
            shape.error("KT207", f'class "{dotted}" is not the name of a class', cls, help=help)
            good = False
        if not good or (cls is not None and dotted is None):
            return None
        at = self.shape.origin
        return NameClass(pattern, dotted, at(name) if name is not None else None, at(cls) if cls is not None else None)

    def replace(self, rule: Mapping) -> Replacement | None:
        node = rule.get("replace")
        if node is None:
            if self.shape.misspelt(rule, "replace", keys.LIST_RULE):
                return None
            help = "write `replace: {class: default}` to keep the module and only place it"
            message = "`replace` is missing: the rule says not what takes the modules' place"
            self.shape.error("KT203", message, self.first_line(rule), help=help)
            return None
        outer = rule.get("kwargs") if self.native else None
        if self.native and isinstance(node, Scalar) and isinstance(node.value, str):
            return self.operator(rule, node, node.value, outer)
        example = "`replace: KTransformersLinear`" if self.native else "`replace: {class: default}`"
        mapping = self.shape.mapping(node, "replace", example)
        if mapping is None:
            return None
        self.replace_keys(rule, mapping)
        inner = mapping.get("kwargs")
        if inner is not None and outer is not None:
            message = "`kwargs` stands both inside `replace` and beside it; keep one"
            self.shape.error("KT206", message, rule.key("kwargs") or rule)
        cls = mapping.get("class")
        if cls is None:
            return self.operator(rule, mapping, "default", inner or outer)
        name = self.shape.inside("replace").text(cls, "class", "`class: default`")
        return None if name is None else self.operator(rule, cls, name, inner or outer)

    def replace_keys(self, rule: Mapping, replace: Mapping) -> None:
        """KT204 for a `recursive` inside `replace`, and KT202 for other keys that don't belong there."""
        key, value = replace.key("recursive"), replace.get("recursive")
        if key is None or value is None:
            self.shape.inside("replace").keys(without_spilled(replace, keys.REPLACE), keys.REPLACE, keys.REPLACE_ELSEWHERE)
            return
        rest = Mapping(tuple((k, v) for k, v in replace if k is not key), replace.span)
        self.shape.inside("replace").keys(rest, keys.REPLACE, keys.REPLACE_ELSEWHERE)
        message = "`recursive` belongs beside match and replace, not inside replace"
        if isinstance(value, Scalar) and value.value in (False, "False", "false") and self.later:
            first, last = self.index + 2, self.index + 1 + self.later
            rules = f"rule {first} takes" if first == last else f"rules {first} to {last} take"
            message += f"; as written it has no effect, and {rules} modules inside what this rule replaces, too"
        fix = self.move_recursive(rule, key, value)
        self.shape.error("KT204", message, key, help="indent `recursive` as far as `match` and `replace`", fix=fix)

    def move_recursive(self, rule: Mapping, key: Scalar, value: Node) -> Fix | None:
        beside = rule.key("replace")
        own_line = isinstance(value, Scalar) and isinstance(value.value, bool) and key.span.start.line == value.span.end.line
        if beside is None or not own_line or rule.get("recursive") is not None or key.span.start.line == beside.span.start.line:
            return None
        line = key.span.start.line
        cut = Edit(self.shape.file, Span(Position(line, 1), Position(line + 1, 1)), "")
        start = beside.span.start
        text = f"recursive: {value.raw if isinstance(value, Scalar) else ''}\n" + " " * (start.column - 1)
        return Fix("move `recursive` beside `replace`", (Edit(self.shape.file, Span(start, start), text), cut))

    def operator(self, rule: Mapping, node: Node, name: str, kwargs: Node | None) -> Replacement | None:
        at = self.shape.inside("replace.class") if isinstance(rule.get("replace"), Mapping) else self.shape.inside("replace")
        spec = find_operator(at, name, node)
        options = self.options(rule, kwargs) if kwargs is not None else None
        if spec is None or (kwargs is not None and options is None):
            return None
        return KwargsReader(self.shape, spec, rule).read(options, name, node)

    def options(self, rule: Mapping, kwargs: Node) -> Mapping | None:
        """`kwargs` as a mapping. Where it is empty, the fix is to indent the options that follow it, or to delete the key."""
        within = rule.get("replace")
        holders = [holder for holder in (rule, within) if isinstance(holder, Mapping) and holder.get("kwargs") is kwargs]
        key = holders[0].key("kwargs") if holders else None
        if key is not None and (options := spilled(holders[0], keys.NATIVE_RULE if holders[0] is rule else keys.REPLACE)):
            message = f"`kwargs:` is empty: {len(options)} of its options stand beside it, not inside"
            help = "indent " + ", ".join(f"`{option.value}`" for option, _ in options) + " by two more spaces"
            self.shape.error("KT205", message, key, help=help, fix=self.indented(key, options))
            return None
        fix = self.shape.deletion(holders[0], key, kwargs) if key is not None else None
        return self.shape.mapping(kwargs, "kwargs", "`generate_device: cuda:0`", fix)

    def indented(self, kwargs: Scalar, options: list[tuple[Scalar, Node]]) -> Fix | None:
        """A fix that puts two spaces before each line of the options that follow an empty `kwargs:`."""
        first, last = options[0][0].span.start.line, options[-1][1].span.end
        lines = range(first, last.line + (last.column > 1))
        if first == kwargs.span.start.line or any(key.span.start.column != kwargs.span.start.column for key, _ in options):
            return None
        spots = [Span(Position(line, 1), Position(line, 1)) for line in lines]
        return Fix("indent the options", tuple(Edit(self.shape.file, spot, "  ") for spot in spots))


def spilled(holder: Mapping, known: Collection[str]) -> list[tuple[Scalar, Node]]:
    """The options of an operator that follow an empty `kwargs:` in the mapping which holds it, for lack of indentation."""
    entries = list(holder.entries)
    at = next((i for i, (key, _) in enumerate(entries) if key.value == "kwargs"), None)
    value = None if at is None else entries[at][1]
    if at is None or not isinstance(value, Scalar) or value.value is not None:
        return []
    foreign = {*known, *keys.NATIVE_RULE, *keys.MATCH}
    return list(takewhile(lambda entry: entry[0].value not in foreign, entries[at + 1 :]))


def without_spilled(holder: Mapping, known: Collection[str]) -> Mapping:
    """The mapping without those options, of which `kwargs` says all that there is to say."""
    options = spilled(holder, known)
    return Mapping(tuple(entry for entry in holder if entry not in options), holder.span) if options else holder


def read_selector(shape: Shape, node: Scalar, text: str, lets: Lets, *, when: bool = False) -> Selector | None:
    """The selector in a scalar. Its findings stand at columns of the text within the quotes; one that uses a name which is wrong
    has none of its own."""
    if lets.uses_wrong(text):
        return None
    from ktopt.selector import parse_selector

    start = node.part(0).start if text else node.span.start
    return parse_selector(text, Origin(shape.file, Span(start, node.span.end)), lets, shape.report, when=when)


def check_name(shape: Shape, node: Scalar, pattern: str) -> bool:
    """Whether `match.name` is a regex. KT304 where it isn't or a class is not the range it seems, KT308 for a literal backslash."""
    named = shape.inside("match.name")
    problem = check_regex(pattern)
    if problem is not None:
        message = problem.message + (f" - {problem.help}" if problem.help else "")
        named.error("KT304", message, node.part(problem.offset, problem.length), fix=_rewrite(named, node, problem))
        return False
    doubtful = class_as_number_range(pattern)
    if doubtful is not None:
        span = node.part(doubtful.offset, doubtful.length)
        fix = named.rewrite(f"write {doubtful.rewrite}", span, doubtful.rewrite, safe=False) if doubtful.rewrite else None
        shape.report.warning("KT304", named.said(doubtful.message), Origin(shape.file, span), help=doubtful.help, fix=fix)
    at = literal_backslash(pattern)
    if at is not None:
        single = node.style == "'"
        remedy = (
            "in single quotes write \\. once, or use double quotes"
            if single
            else "write \"\\\\.\" in double quotes, or '\\.' in single ones"
        )
        message = f"the pattern contains a literal backslash (\\\\), so it can match no module - {remedy}"
        named.error("KT308", message, node.part(at, 2), help="no module's path has a backslash", fix=_one_backslash(named, node))
    return True


def _rewrite(shape: Shape, node: Scalar, problem: RegexProblem) -> Fix | None:
    if problem.rewrite is None or "'" in problem.rewrite or node.span.start.line != node.span.end.line:
        return None
    return shape.rewrite("rewrite the pattern", node, f"'{problem.rewrite}'", safe="bad character range" in problem.message)


def _one_backslash(shape: Shape, node: Scalar) -> Fix | None:
    if node.span.start.line != node.span.end.line or "'" in str(node.value):
        return None
    text = str(node.value).replace("\\\\", "\\")
    return shape.rewrite("write each backslash once", node, f"'{text}'") if check_regex(text) is None else None
