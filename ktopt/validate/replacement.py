"""`replace` and `kwargs` of one rule: which operator, with which options, on which devices.

The operator is looked up in the registry, never imported from the text, and its kwargs are checked against its own typed config:
what upstream dropped into **kwargs without a word is a finding here.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping as Map
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any

from ktopt import registry
from ktopt.diagnostics import Fix, Related, Severity
from ktopt.operator import OperatorConfig, OperatorSpec, Problem, build_config, field_types, nearest, option_names, yaml_text
from ktopt.placement import DEVICE_KINDS, canonical_device, device_kind
from ktopt.ruleset import Replacement
from ktopt.source import Mapping, Node, Scalar, Span, plain
from ktopt.validate.shape import Shape, alike, unquoted_boolean

PHASES = (("generate_op", "generate_device"), ("prefill_op", "prefill_device"), ("hot_op", "hot_device"))


def find_operator(shape: Shape, name: str, node: Node) -> OperatorSpec | None:
    """The operator of that name, or None with a KT401 that names the nearest one. KT410 warns of what is lost by using it here."""
    spec = registry.find(name)
    if spec is None:
        package, _, last = name.rpartition(".")
        owner = _owner(last)
        if owner:
            message = f"{last} is an op of {owner}, not an operator"
            shape.error("KT401", message, node, help=f"write {owner}, and `generate_op: {last}` in its kwargs")
            return None
        near = registry.suggest(name)
        simple = near.rpartition(".")[2]
        known = any(name.startswith(f"{home}.") for home in _packages())
        message = f"{package} has no {last} in this version" if known else f'there is no operator "{name}"'
        message += f"; did you mean {simple}?" if near else ""
        help = f"write {near}" if near else "`ktopt operators` lists them all; `default` keeps the module and only places it"
        fix = shape.rewrite(f"write {near}", node, near, safe=False) if near else None
        shape.error("KT401", message, node, help=help, fix=fix)
        return None
    if spec.lost:
        shape.warning("KT410", f"{spec.name} works on any torch device here, without {spec.lost}", node)
    return spec


def _packages() -> set[str]:
    """The packages that operators are written with, such as ktransformers."""
    names = (name for spec in registry.specs() for name in (spec.name, *spec.aliases))
    return {name.partition(".")[0] for name in names if "." in name}


def _owner(op: str) -> str:
    """The most general operator that has this op, or ""."""
    owners = [spec for spec in registry.specs() if op in spec.ops]
    general = sorted(owners, key=lambda spec: (bool(spec.lost), not spec.name.startswith("KTransformers"), len(spec.name)))
    return general[0].name if general else ""


@dataclass
class KwargsReader:
    """Checks one rule's kwargs against an operator. `rule` is where a missing kwarg is reported."""

    shape: Shape
    spec: OperatorSpec
    rule: Node

    def __post_init__(self) -> None:
        config: Any = self.spec.config
        self.names: dict[Any, str] = option_names(config)
        self.hints: dict[str, Any] = field_types(config)
        self.metadata: dict[str, Map[str, Any]] = {f.name: f.metadata for f in fields(config)}
        self.defaults: dict[str, Any] = {f.name: f.default for f in fields(config)}

    def read(self, kwargs: Mapping | None, written: str, class_node: Node) -> Replacement | None:
        """The Replacement, or None with findings."""
        entries = list(kwargs) if kwargs is not None else []
        before = len(self.shape.report)
        values = {key.value: value for key, node in entries if (value := self.value(key, node)) is not _DROPPED}
        config, problems = build_config(self.spec, values)
        nodes = {key.value: (key, node) for key, node in entries}
        dropped = len(values) < len(nodes)
        for problem in problems:
            if not (dropped and problem.kind == "missing"):
                self.report(problem, nodes, kwargs)
        if config is None:
            return None
        given = {self.names[key]: getattr(config, self.names[key]) for key in values}
        places = {self.names[key]: nodes[key] for key in values}
        self.check_ops(config, {name: node for name, (_, node) in places.items()})
        if any(d.code.startswith("KT4") and d.severity is Severity.ERROR for d in self.shape.report.items[before:]):
            return None
        origins = {name: self.shape.origin(key) for name, (key, _) in places.items()}
        return Replacement(self.spec, written, config, given, self.shape.origin(class_node), origins)

    def value(self, key: Scalar, node: Node) -> Any:
        """A kwarg's plain value, devices in canonical spelling; _DROPPED, with a finding, where the rest can go on without it."""
        name = self.names.get(key.value)
        if name is None:
            return plain(node)
        hint = self.hints[name]
        if isinstance(node, Mapping) and _is_device_map(hint):
            return self.device_map(key, node)
        if self.metadata[name].get("device") and isinstance(node, Scalar):
            return self.device(str(key.value), node)
        return plain(node)

    def device(self, name: str, node: Scalar) -> Any:
        if not isinstance(node.value, str):
            return node.value
        return read_device(self.shape.inside(f"kwargs.{name}"), node) or _DROPPED

    def device_map(self, key: Scalar, mapping: Mapping) -> Any:
        """A mapping of layers to devices. Quoted layer numbers are a finding, and read as the numbers that they were meant as."""
        shape = self.shape.inside(f"kwargs.{key.value}")
        found: dict[Any, Any] = {}
        for layer, node in mapping:
            number = layer.value
            if isinstance(number, str) and number.isdecimal():
                message = f'key "{number}" is a string, layer numbers are integers - remove the quotes'
                help = "a string never equals a layer number, so the transfer would never happen"
                shape.error("KT404", message, layer, help=help, fix=shape.rewrite("remove the quotes", layer, number))
                number = int(number)
            value = self.device(f"{key.value}.{number}", node) if isinstance(node, Scalar) else plain(node)
            if value is not _DROPPED:
                found[number] = value
        return found

    def report(self, problem: Problem, nodes: Map[str, tuple[Scalar, Node]], kwargs: Mapping | None) -> None:
        """A Problem of build_config as a finding at its key or value."""
        message = problem.message.removeprefix(f"`{problem.key}`: ")
        if problem.kind == "missing":
            related = (Related("the kwargs that lack it", self.shape.origin(kwargs)),) if kwargs is not None else ()
            fix = self.copy_of_prefill(problem, nodes, kwargs)
            self.shape.inside("kwargs").error("KT409", message, self.first_line(), related=related, fix=fix)
            return
        key, node = nodes.get(problem.key, (None, None))
        at = kwargs or self.rule
        shape = self.shape.inside(f"kwargs.{problem.key}")
        if problem.kind == "unknown":
            self.unknown_kwarg(problem, key or at, set(nodes))
        elif problem.kind == "ignored":
            shape.warning("KT408", message, key or at)
        elif problem.kind == "idle":
            shape.info("KT408", message, key or at)
        elif problem.kind == "type":
            shape.error("KT404", message, node or at, **self.mend_type(node, problem))
        else:
            is_op = self.metadata.get(self.names.get(problem.key, ""), {}).get("op")
            near = problem.suggestion
            if is_op and not near and isinstance(node, Scalar):
                near = next(iter(get_close_matches(str(node.value), self.spec.ops, 1, 0.5)), "")
                message += f" (did you mean {near}?)" if near else ""
            fix = shape.rewrite(f"write {near}", node, f'"{near}"', safe=False) if near and node else None
            shape.error("KT402" if is_op else "KT405", message, node or at, fix=fix)

    def copy_of_prefill(self, problem: Problem, nodes: Map[str, tuple[Scalar, Node]], kwargs: Mapping | None) -> Fix | None:
        """For a generate_device that is missing beside a prefill_device, the guess that it is the same one."""
        key, node = nodes.get("prefill_device", (None, None))
        if problem.key != "generate_device" or key is None or not isinstance(node, Scalar) or kwargs is None:
            return None
        flow = kwargs.span.start != kwargs.entries[0][0].span.start
        gap = ", " if flow else "\n" + " " * (key.span.start.column - 1)
        here = Span(key.span.start, key.span.start)
        return self.shape.rewrite(f"add `generate_device: {node.raw}`", here, f"generate_device: {node.raw}{gap}", safe=False)

    def first_line(self) -> Node:
        """The rule's first key: a rule's own span covers all its lines."""
        return next((key for key, _ in self.rule), self.rule) if isinstance(self.rule, Mapping) else self.rule

    def unknown_kwarg(self, problem: Problem, at: Node, given: set[str]) -> None:
        taken = {self.names.get(key) for key in given}
        near = nearest(str(problem.key), [name for name, field in self.names.items() if field not in taken])
        near = near if alike(str(problem.key), near) else ""
        if problem.key == "device" and "generate_device" in self.names:
            near = "generate_device"
        options = ", ".join(self.hints)
        takes = f"{self.spec.name} takes {options}" if options else f"{self.spec.name} takes no kwargs"
        message = f"{self.spec.name} takes no `{problem.key}`" + (f"; did you mean `{near}`?" if near else f"; it takes {options}")
        if problem.key == "device" and isinstance(self.rule, Mapping) and self.rule.get("kwargs") is not None:
            takes = "the file's `place:` may say it too; " + takes
        fix = self.shape.rewrite(f"write `{near}`", at, near, safe=False) if near and near not in given else None
        self.shape.inside("kwargs").error("KT403", message, at, help=takes, fix=fix)

    def mend_type(self, node: Node | None, problem: Problem) -> dict[str, Any]:
        """Help, and a fix where it is certain, for a value of the wrong type."""
        name = self.names[problem.key]
        hint = self.hints[name]
        text = node.value if isinstance(node, Scalar) and node.style and isinstance(node.value, str) else None
        quoted_boolean = (hint is bool or bool in typing.get_args(hint)) and node is not None and unquoted_boolean(node) is not None
        quoted_number = hint is int and text is not None and text.removeprefix("-").isdecimal()
        if node is not None and text is not None and (quoted_boolean or quoted_number):
            return {"help": "remove the quotes", "fix": self.shape.rewrite("remove the quotes", node, text)}
        default = self.defaults[name]
        if default is not MISSING and default is not None:
            help = f"such as `{problem.key}: {yaml_text(default)}`, which is what it is when the key is absent"
            empty = isinstance(node, Scalar) and node.value is None and node.raw and isinstance(default, str)
            fix = self.shape.rewrite(f"write {default}", node, f'"{default}"', safe=False) if empty and node else None
            return {"help": help, "fix": fix}
        return {}

    def check_ops(self, config: OperatorConfig, nodes: Map[str, Node]) -> None:
        """KT406 for each op that the rule names together with a device that it can't run on."""
        for op_name, device_name in PHASES:
            op = self.spec.ops.get(getattr(config, op_name, None) or "")
            device = getattr(config, device_name, None)
            if op is None or op_name not in nodes or device is None or device_kind(device) in op.devices:
                continue
            kind = device_kind(device)
            others = [o.name for o in self.spec.ops.values() if kind in o.devices and o.name != "None"]
            if op.counterpart in others:
                others = [op.counterpart, *(o for o in others if o != op.counterpart)]
            use = f"use {' or '.join(others[:2])} for {kind}, or a {' or '.join(op.devices)} device" if others else ""
            message = f"{op.name} runs on {' or '.join(op.devices)} only, got {device}" + (f"; {use}" if use else "")
            at = nodes.get(device_name) or nodes[op_name]
            related = [Related(f"{op_name} is named here", self.shape.origin(nodes[op_name]))]
            other = op.counterpart if op.counterpart in others else ""
            fix = self.shape.rewrite(f"write {other}", nodes[op_name], f'"{other}"', safe=False) if other else None
            self.shape.inside(f"kwargs.{device_name}").error("KT406", message, at, related=related, fix=fix)


class _Dropped:
    """Stands for a kwarg that had a finding and is left out, so that the rest can still be checked."""


_DROPPED = _Dropped()


def _is_device_map(hint: Any) -> bool:
    """Whether an option maps layers to devices, as transfer_map does."""
    return dict[int, str] in (hint, *typing.get_args(hint))


def read_device(shape: Shape, node: Scalar) -> str:
    """A device's canonical name. For what is no device a KT501, and the one that was probably meant ("" if none), so that checking
    can go on."""
    text = str(node.value)
    try:
        return canonical_device(text)
    except ValueError as error:
        near, why = near_device(text), str(error).partition(" is not a device")[2]
    hint = f"; did you mean {near}?" if near else why if why.startswith(":") else ""
    message = f'"{text}" is not a device{hint}'
    help = f"devices are {', '.join(DEVICE_KINDS)}, or one with a number such as cuda:1"
    same = near == text.strip().lower()
    fix = shape.rewrite(f"write {near}", node, f'"{near}"', safe=same) if near else None
    shape.error("KT501", message, node, help=help, fix=fix)
    return near


def near_device(text: str) -> str:
    """The device that a misspelt one was probably meant as ("" when none is near): gpu:1 is cuda:1, CPU is cpu, cuda1 is cuda:1."""
    if "-" in text:
        return ""
    kind = text.strip().lower().rstrip("0123456789: ")
    number = text.strip()[len(kind) :].strip(": ")
    kind = "cuda" if kind in ("gpu", "nvidia", "cuda", "hip", "rocm") else nearest(kind, DEVICE_KINDS)
    try:
        return canonical_device(f"{kind}:{number}" if number and kind != "cpu" else kind)
    except ValueError:
        return ""
