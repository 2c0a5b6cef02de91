"""The second stage: YAML nodes of either rule form to one RuleSet, with a finding for everything that upstream swallowed.

Precedence over imported files: a file's own rules and places come first, then those of its imports in the order listed, each file
once; so a file overrides what it imports, by first match wins. `let` names of imports are known in the file, which may give them
anew. `architectures`, `dtype` and `default_device` are the file's own where it says them, otherwise those of the first import that
does.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import Related, Report
from ktopt.placement import DTYPES
from ktopt.ruleset import Auto, NameClass, Place, Rule, RuleSet
from ktopt.source import FILE_START, Document, Mapping, Node, Origin, Scalar, Sequence, Span
from ktopt.validate import keys
from ktopt.validate.lets import Lets, check_order
from ktopt.validate.replacement import read_device
from ktopt.validate.rules import RuleReader, read_selector
from ktopt.validate.shape import Shape, kind_of

if TYPE_CHECKING:
    from ktopt.selector import Selector

MAX_RULES = 2000
LIST_DEVICE, NATIVE_DEVICE = "cuda:0", "cpu"
_LET = re.compile(r"[A-Za-z_]\w*")


def validate(document: Document, report: Report) -> RuleSet | None:
    """The rule set of a parsed file. None where an error leaves none to go on with (Report.stops_plan): all is in the report."""
    reader = _Reader(report)
    reader.document(document)
    reader.unused_lets(document.source.path)
    return None if report.stops_plan or not reader.form else reader.ruleset(document)


@dataclass
class _Reader:
    """Collects rules and places over a file and its imports, in order of precedence."""

    report: Report
    form: str = ""
    count: int = 0
    rules: list[Rule] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    ids: dict[str, Origin] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    architectures_origin: Origin | None = None
    default_device_origin: Origin | None = None
    auto: Auto | None = None
    texts: list[str] = field(default_factory=list)
    lets: list[tuple[str, Selector, Origin]] = field(default_factory=list)
    scopes: dict[int, Lets] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    blocks: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in keys.SECTIONS})

    def document(self, document: Document) -> None:
        shape = Shape(document.source.path, self.report)
        self.texts.append(document.source.text.replace("\r\n", "\n").removeprefix("\ufeff"))
        root = document.root
        if isinstance(root, Sequence):
            self.form = self.form or "list"
            self.rule_list(shape, root, native=False, lets=Lets())
        elif isinstance(root, Mapping):
            self.form = self.form or "native"
            self.native(document, shape, root)
        elif root is None or root.value is None:
            if not any(d.file == shape.file and d.code.startswith("KT1") for d in self.report.errors):
                help = "write a list of rules (`- match:` ...), or `version: 1` and `rules:`"
                shape.error("KT201", "the file holds no rules", FILE_START, help=help)
        else:
            message = f"a rule file is a list of rules or a mapping with `rules:`, not {kind_of(root)}"
            shape.error("KT201", message, root, help="begin each rule with `- match:`")

    def rule_list(self, shape: Shape, nodes: Sequence, *, native: bool, lets: Lets) -> None:
        if not nodes.items and not native:
            shape.error("KT201", "the file holds no rules", nodes, help="begin each rule with `- match:`")
        if self.count + len(nodes.items) > MAX_RULES:
            shape.error("KT104", f"more than {MAX_RULES} rules; one pattern can take many modules", nodes.items[-1])
            return
        for position, node in enumerate(nodes.items):
            index = self.count
            self.count += 1
            where = self.named(shape, node, index, native)
            rule = RuleReader(shape.inside(where), node, index, len(nodes.items) - position - 1, native, lets).read()
            if rule is not None:
                self.rules.append(rule)

    def named(self, shape: Shape, node: Node, index: int, native: bool) -> str:
        """How messages name a rule: "rule 3", or "rule 3 (attention)" where it has an id, which must be its own."""
        where = f"rule {index + 1}"
        given = node.get("id") if native and isinstance(node, Mapping) else None
        if given is None:
            return where
        text = shape.inside(where).text(given, "id", "`id: attention`")
        if text is None:
            return where
        if text in self.ids:
            related = [Related("first used here", self.ids[text])]
            shape.inside(where).error(
                "KT207", f'id "{text}" is given twice', given, help="give each rule its own id", related=related
            )
        self.ids.setdefault(text, shape.origin(given))
        return f"{where} ({text})"

    def native(self, document: Document, shape: Shape, top: Mapping) -> None:
        self.read.add(id(document))
        shape.keys(top, keys.TOP, keys.TOP_ELSEWHERE)
        lets = self.scope(document)
        holds = {key.value for key, _ in top} & {"rules", "place", "import", "let", *keys.SECTIONS}
        if not holds and not any(d.file == shape.file for d in self.report.errors):
            at = top.entries[0][0] if top.entries else top
            shape.error("KT203", "`rules` is missing", at, help="write `rules:` and a list of rules")
        self.settings(shape, top)
        self.sections(shape, top)
        rules = top.get("rules")
        if isinstance(rules, Sequence):
            self.rule_list(shape, rules, native=True, lets=lets)
        elif rules is not None:
            self.not_a_list(shape, rules)
        place = top.get("place")
        if isinstance(place, Scalar) and place.value == "auto":
            self.auto = self.auto or Auto(shape.origin(place))
        else:
            for device, node in self.entries(shape, top, "place", '`"cuda:0": "layer in 0..29"`, or `auto`'):
                if device.value == "auto":
                    self.rest(shape.inside("place"), device, node)
                else:
                    self.place(shape.inside("place"), device, node, lets)
        for imported in document.imports:
            if id(imported) not in self.read:
                self.document(imported)

    def not_a_list(self, shape: Shape, rules: Node) -> None:
        if isinstance(rules, Scalar) and rules.value is None:
            shape.error("KT205", "`rules:` is empty", rules, help="write a list of rules below it, or delete the key")
        else:
            shape.error("KT206", f"`rules` must be a list, not {kind_of(rules)}", rules, help="begin each rule with `- id:`")

    def entries(self, shape: Shape, top: Mapping, key: str, example: str) -> list[tuple[Scalar, Node]]:
        node = top.get(key)
        mapping = shape.mapping(node, key, example) if node is not None else None
        return list(mapping.entries) if mapping is not None else []

    def scope(self, document: Document) -> Lets:
        """The selectors that `$name` may stand for in a file: its imports' and its own `let`."""
        if id(document) in self.scopes:
            return self.scopes[id(document)]
        lets = Lets()
        for imported in document.imports:
            lets.add_imported(self.scope(imported))
        shape = Shape(document.source.path, self.report)
        if isinstance(document.root, Mapping):
            entries = self.entries(shape, document.root, "let", '`experts: "@model.layers.*.mlp.experts"`')
            check_order(shape.inside("let"), entries, lets)
            for key, node in entries:
                self.let(shape.inside("let"), key, node, lets)
        self.scopes[id(document)] = lets
        return lets

    def let(self, shape: Shape, key: Scalar, node: Node, lets: Lets) -> None:
        name = str(key.value)
        text = shape.text(node, name, '`"@model.layers.*"`')
        if not _LET.fullmatch(name):
            shape.error("KT207", f'"{name}" is not a name', key, help="use letters, digits and _, and begin with a letter")
        elif text is not None and isinstance(node, Scalar):
            selector = None if name in lets.wrong else read_selector(shape.inside(name), node, text, lets)
            if selector is None:
                lets.wrong.add(name)
            else:
                lets[name] = selector
                self.lets.append((name, selector, shape.origin(key)))

    def unused_lets(self, file: str) -> None:
        """KT209 for names of the file itself, where all of it could be read. One that has neither rules nor places is there for
        others to import."""
        rules = [rule for rule in self.rules if rule.origin.file == file]
        places = [place for place in self.places if place.origin.file == file]
        if self.report.errors or not (rules or places):
            return
        asked = [place.selector for place in places]
        asked += [s for rule in rules for s in (rule.match, rule.when) if s is not None and not isinstance(s, NameClass)]
        own = [entry for entry in self.lets if entry[2].file == file]
        used = set().union(*(selector.names_used for selector in (*asked, *(s for _, s, _ in own))))
        for name, _, origin in own:
            if name not in used:
                self.report.info("KT209", f"let {name}: nothing in this file uses ${name}", origin, help="take it out, or use it")

    def place(self, shape: Shape, device: Scalar, node: Node, lets: Lets) -> None:
        name = read_device(shape, device)
        text = shape.text(node, str(device.value), '`"layer in 0..29"`')
        if text is None or not isinstance(node, Scalar):
            return
        selector = read_selector(shape.inside(str(device.value)), node, text, lets)
        if selector is not None and name:
            self.places.append(Place(name, selector, shape.origin(device)))

    def rest(self, shape: Shape, key: Scalar, node: Node) -> None:
        """`auto: rest`: what no line takes is left to ktopt."""
        if isinstance(node, Scalar) and node.value == "rest":
            self.auto = self.auto or Auto(shape.origin(key))
            return
        fix = shape.rewrite("write rest", node, "rest", safe=False) if isinstance(node, Scalar) else None
        message = f"`auto` takes what no other line takes: its value is `rest`, not {kind_of(node)}"
        shape.error("KT207", message, node, help="write `auto: rest`, and a line for each device that you choose yourself", fix=fix)

    def settings(self, shape: Shape, top: Mapping) -> None:
        """version, architectures, dtype, default_device."""
        version = top.get("version")
        if version is None:
            at = top.entries[0][0] if top.entries else top
            begins = top.entries and at.span.start == top.span.start and at.span.start.column == 1
            fix = shape.rewrite("begin with `version: 1`", Span(at.span.start, at.span.start), "version: 1\n") if begins else None
            shape.warning("KT203", "`version` is missing; read as version 1", at, help="begin the file with `version: 1`", fix=fix)
        elif not isinstance(version, Scalar) or version.value != 1 or isinstance(version.value, bool):
            shape.error("KT207", f"version {kind_of(version)} of the rule language isn't known", version, help="write `version: 1`")
        if (node := top.get("architectures")) is not None:
            names = shape.texts(node, "architectures", "`architectures: [DeepseekV3ForCausalLM]`")
            if "architectures" not in self.said:
                self.said["architectures"], self.architectures_origin = names, shape.origin(node)
        if (node := top.get("dtype")) is not None:
            name = shape.text(node, "dtype", "`dtype: bfloat16`")
            if name is not None and name.removeprefix("torch.") not in DTYPES:
                shape.error("KT207", f'dtype "{name}" isn\'t known', node, help=f"write one of {', '.join(DTYPES)}")
            elif name is not None:
                self.said.setdefault("dtype", name.removeprefix("torch."))
        if (node := top.get("default_device")) is not None and isinstance(node, Scalar):
            device = read_device(shape.inside("default_device"), node)
            if "default_device" not in self.said:
                self.said["default_device"], self.default_device_origin = device, shape.origin(node)

    def sections(self, shape: Shape, top: Mapping) -> None:
        """long_context and kvc2. What a file says goes before what its imports say, key by key."""
        for name in keys.SECTIONS:
            if (node := top.get(name)) is None:
                continue
            from ktopt.config import long_settings
            from ktopt.validate.settings import SectionReader, check_together

            section = shape.mapping(node, name, "its keys")
            values = SectionReader(shape, name, section).read() if section is not None else None
            if values is None or section is None:
                continue
            if name == "long_context":
                check_together(shape.inside(name), section, long_settings(values), values, whole=False)
            self.blocks[name] = {**values, **self.blocks[name]}

    def ruleset(self, document: Document) -> RuleSet:
        digest = hashlib.sha256("\0".join(self.texts).encode()).hexdigest()
        device = LIST_DEVICE if self.form == "list" else self.said.get("default_device") or NATIVE_DEVICE
        return RuleSet(
            form=self.form,
            path=document.source.path,
            digest=digest,
            rules=tuple(self.rules),
            places=tuple(self.places),
            architectures=self.said.get("architectures", ()),
            architectures_origin=self.architectures_origin,
            dtype=self.said.get("dtype"),
            default_device=device,
            origin=document.origin(document.root) if document.root is not None else None,
            default_device_origin=self.default_device_origin,
            auto=self.auto,
            **self.blocks,
        )
