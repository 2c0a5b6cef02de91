"""What an operator declares of itself, without torch: its names, the modules it fits, its YAML kwargs, its bytes.

One frozen dataclass of an operator's kwargs feeds everything: YAML validation, JSON Schema, the CLI's pages, docs/operators.md.
An operator's file under operators/ declares; its implementation (an nn.Module) is named by a string that only `apply` resolves.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ktopt.graph import ITEM_BYTES, Module
from ktopt.placement import Footprint, Running, Working, canonical_device, device_kind

if TYPE_CHECKING:
    from ktopt.plan import Step


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    aliases: tuple[str, ...] = (),
    device: bool = False,
    op: bool = False,
    ignored: str = "",
    ignored_when: Callable[[Any], str] | None = None,
    idle_when: Callable[[Any], str] | None = None,
    read_by: tuple[str, ...] = (),
    minimum: int | None = None,
    maximum: int | None = None,
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """A field of an OperatorConfig.

    help      one line for the schema, the CLI and the docs
    aliases   other spellings that YAML may use (upstream's misspellings)
    device    the value is a device name, kept in its canonical spelling
    op        the value names one of the operator's inner ops
    ignored   accepted because upstream files carry it, but nothing reads it: why, in words
    ignored_when   of a value: why this value has no effect here, or "" where it has
    idle_when      of a value that upstream's files rightly carry: why it has no effect in this version, or "" where it has
    read_by   the inner ops that read it, where not all do
    minimum, maximum   the least and the greatest value of a number
    """
    meta = {
        "help": help,
        "aliases": aliases,
        "device": device,
        "op": op,
        "ignored": ignored,
        "ignored_when": ignored_when,
        "idle_when": idle_when,
        "read_by": read_by,
        "minimum": minimum,
        "maximum": maximum,
    }
    if default_factory is not dataclasses.MISSING:
        return field(default_factory=default_factory, metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class OperatorConfig:
    """Base of all operators' kwargs. Fields are the YAML keys; annotations are checked (bool, int, float, str, Literal, unions with
    None, dict[int, str])."""

    spec: ClassVar[OperatorSpec]

    def to_kwargs(self) -> dict[str, Any]:
        """The full kwargs, defaults included, in field order."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> list[Problem]:
        """What is wrong between kwargs that are each well formed; `given` holds those written, by field name."""
        return []


@dataclass(frozen=True, kw_only=True)
class PlacedConfig(OperatorConfig):
    """kwargs of every operator that is placed by a rule. None means the module's place, or else the plan's default device."""

    generate_device: str | None = option(None, help="device of the weights, of prefill and of decoding", device=True)
    prefill_device: str | None = option(
        None, help="device of prefill in KTransformers; recorded only: prefill runs on generate_device in this version", device=True
    )


@dataclass(frozen=True, slots=True)
class Op:
    """An inner op that a rule names by `generate_op` or `prefill_op`.

    devices       kinds of device that it runs on
    counterpart   the op that takes its place on a device that it can't run on (under --remap), or "" for none
    needs         why it isn't to be had in this version ("" when it is); its counterpart then runs, and the plan says so
    keeps         storage types (as a weight file names them) that it computes on as they are stored, so that its weights take no
                  more than in the file; others it holds in the plan's dtype
    least_sm      of an op on CUDA: the compute capability times ten (89 for 8.9) from which its kernels run
    packs         it keeps the weight only in a packed form, from which the plain weight can't be had back
    formerly      names that old tutorials give it, which no version here takes: for suggestions
    """

    name: str
    devices: tuple[str, ...]
    help: str
    counterpart: str = ""
    needs: str = ""
    keeps: tuple[str, ...] = ()
    least_sm: int = 0
    packs: bool = False
    formerly: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """Everything that checking and planning need of an operator.

    name             as KTransformers named it
    aliases          other names: upstream's dotted paths, older names
    families         transformers' model_types that it was written for, where another operator of its roles is for others
    roles            roles of the modules that it fits (graph.role_of); empty means any
    config           its kwargs
    implementation   "package.module:Class" with build() (see ktopt.apply), or "" where the module stays as it is and is only placed
    ops              inner ops by name
    summary          what it does here, one line
    upstream         what upstream's class of that name did
    forward_changed  whether upstream's class changed the module's forward
    reason           where it did and ours only places: why that is right
    upstream_device  where upstream's class put its weights when a list-form rule said nothing; "" is the default device
    lost             what is lost by using it here (NPU and XPU names): makes a warning
    footprint        bytes of one module under this config and dtype
    working          what a module holds while it runs; None: as transformers' own of its role
    loading          bytes that a module's device holds for it at most while its weights are made, under this config and dtype,
                     where that is more than they take
    takes_two        name of the child whose weight it keeps as a file has it in two pieces (StoredTensor.in_two), where the child's
                     op keeps their types
    blocks           it keeps keys and values in blocks, as a rule file's long_context and kvc2 say; what they take is reckoned for
                     all layers together
    refuses          why it can't take this module under this config, or None
    refuses_below    why it can't take this module of a model of this config over what a plan makes of those below it (their rows),
                     or None
    leaves           why it leaves a module as it is over what a plan makes of those below it, or ""
    says             what a plan has to say of this config: values that have no effect in this version ("" for nothing)
    """

    name: str
    config: type[OperatorConfig]
    summary: str
    aliases: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    implementation: str = ""
    ops: Mapping[str, Op] = field(default_factory=dict)
    upstream: str = ""
    forward_changed: bool = False
    reason: str = ""
    upstream_device: str = ""
    lost: str = ""
    families: tuple[str, ...] = ()
    footprint: Callable[[Module, OperatorConfig, str], Footprint] = lambda m, c, d: dense_footprint(m, c, d)
    working: Callable[[Running], Working] | None = None
    loading: Callable[[Module, OperatorConfig, str], int] | None = None
    takes_two: str = ""
    blocks: bool = False
    refuses: Callable[[Module, OperatorConfig], str | None] = lambda m, c: None
    refuses_below: Callable[[Module, Step, Sequence[Step], Mapping[str, Any]], str | None] | None = None
    leaves: Callable[[Sequence[Step]], str] | None = None
    says: Callable[[OperatorConfig], str] = lambda c: "; ".join(without_effect(c))

    def fits(self, module: Module) -> bool:
        return not self.roles or module.role in self.roles


def op_on(spec: OperatorSpec, asked: Op, device: str) -> tuple[Op, str]:
    """The op that runs for `asked` on `device`: itself, or the first counterpart that can, with the reason. `asked` itself, for no
    reason, where neither it nor a counterpart can.

    That an op can't run on the device that its own rule names is an error of the validate stage; under --remap, or for want of a
    kernel, another takes its place.
    """
    op, reasons = asked, []
    while True:
        if device_kind(device) not in op.devices:
            reasons.append(f"{op.name} doesn't run on {device_kind(device)}")
        elif op.needs:
            reasons.append(op.needs)
        else:
            return op, "; ".join(reasons)
        if not op.counterpart:
            return asked, ""
        op = spec.ops[op.counterpart]


def dense_footprint(module: Module, config: OperatorConfig, dtype: str) -> Footprint:
    """A module's own tensors, its floating-point parameters held in `dtype`, but a router's float32 ones as they are."""
    total = 0
    for tensor in module.tensors:
        kept = tensor.buffer or "float" not in tensor.dtype or (module.role == "router" and tensor.dtype == "float32")
        item = tensor.dtype if kept else dtype
        total += tensor.numel * ITEM_BYTES[item]
    return Footprint(weight_bytes=total)


REGISTERED: dict[str, OperatorSpec] = {}
"""Specs that @operator has registered in this process, by every one of their names."""


def operator(name: str, **spec: Any) -> Callable[[type[OperatorConfig]], type[OperatorConfig]]:
    """Class decorator of an operator's config: registers an OperatorSpec of that name. Fields as OperatorSpec's.

    The same config class may carry several operators (the decorator may be stacked, or called as a function).
    """

    def register(config: type[OperatorConfig]) -> type[OperatorConfig]:
        made = OperatorSpec(name=name, config=config, **spec)
        config.spec = made
        for key in (name, *made.aliases):
            if key in REGISTERED and REGISTERED[key] != made:
                raise ValueError(f"two operators are named {key}: {REGISTERED[key].name} and {name}")
            REGISTERED[key] = made
        return config

    return register


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with one kwarg. `key` as written; `kind` is unknown, type, value, missing, ignored (nothing reads it),
    or idle (right, and without effect in this version: a phase or a kernel that isn't there yet)."""

    key: str
    kind: Literal["unknown", "type", "value", "missing", "ignored", "idle"]
    message: str
    suggestion: str = ""


def build_config(spec: OperatorSpec, kwargs: Mapping[str, Any]) -> tuple[OperatorConfig | None, list[Problem]]:
    """An operator's config from YAML kwargs, with every problem found. The config is None when a problem is more than "ignored" or
    "idle"."""
    config: Any = spec.config
    known, hints = option_names(config), field_types(config)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in kwargs.items():
        name = known.get(key)
        if name is None:
            near = nearest(str(key), known)
            message = f"{spec.name} takes no `{key}`" + (f"; did you mean `{near}`?" if near else f"; it takes {', '.join(hints)}")
            problems.append(Problem(key, "unknown", message, near))
            continue
        if name in values:
            problems.append(Problem(key, "value", f"`{key}` and another spelling of `{name}` are both given"))
            continue
        meta = spec.config.__dataclass_fields__[name].metadata
        problem, value = _check(spec, key, value, hints[name], meta)
        if problem:
            problems.append(problem)
        elif why := meta.get("ignored") or (meta["ignored_when"](value) if meta.get("ignored_when") else ""):
            problems.append(Problem(key, "ignored", f"`{key}: {yaml_text(value)}` has no effect: {why}"))
        values[name] = value
    for f in dataclasses.fields(spec.config):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            problems.append(Problem(f.name, "missing", f"{spec.name} needs `{f.name}`: {f.metadata.get('help', '')}"))
    if not any(_spoils(p) for p in problems):
        problems += spec.config.cross_check(values)
    if any(_spoils(p) for p in problems):
        return None, problems
    made = spec.config(**values)
    return made, [*problems, *_idle(spec, made, {known[key]: key for key in kwargs})]


_NOT_TEXT = re.compile(r"(?i)(?:null|true|false|yes|no|on|off|~|[-+.\d][\d_.,:e+-]*|)")


def yaml_text(value: Any) -> str:
    """A value as YAML has it on one line: null, true, a word without quotes where it stays a word."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{yaml_text(key)}: {yaml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    if isinstance(value, str) and (_NOT_TEXT.fullmatch(value) or not re.fullmatch(r"[\w./\\][\w.:/\\ -]*", value)):
        return "'" + value.replace("'", "''") + "'"
    return str(value)


def _spoils(problem: Problem) -> bool:
    return problem.kind not in ("ignored", "idle")


PREFILL = "prefill runs by the generate op on the generate device in this version"


def _idle(spec: OperatorSpec, config: OperatorConfig, given: Mapping[str, str]) -> Iterator[Problem]:
    """Kwargs that are right by themselves and of no effect beside the others; `given` is field name -> key as written."""
    op = spec.ops.get(str(getattr(config, "generate_op", None)))
    for name, key in given.items():
        value, meta = getattr(config, name), config.__dataclass_fields__[name].metadata
        readers = meta.get("read_by", ())
        if name in ("prefill_device", "prefill_op"):
            generate = getattr(config, name.replace("prefill", "generate"), None)
            if not meta.get("ignored") and value not in (None, "None", generate) and generate is not None:
                yield Problem(key, "idle", f"`{key}: {yaml_text(value)}` has no effect: {PREFILL}, {generate}")
        elif readers and op is not None and op.name not in readers:
            only = f"only {' and '.join(readers)} read{'s' * (len(readers) == 1)} it"
            yield Problem(
                key, "ignored", f"`{key}: {yaml_text(value)}` has no effect: {only}, and the rule's generate_op is {op.name}"
            )
        elif readers and op is not None and op.needs:
            yield Problem(key, "idle", f"`{key}: {yaml_text(value)}` has no effect: {op.name} would read it, and {op.needs}")
        elif (why := meta.get("idle_when")) and (reason := why(value)):
            yield Problem(key, "idle", f"`{key}: {yaml_text(value)}` has no effect: {reason}")


def without_effect(config: OperatorConfig) -> list[str]:
    """What a plan has to say of values that differ from the default and have no effect in this version, in field order."""
    said = []
    for f in dataclasses.fields(config):
        value, why = getattr(config, f.name), f.metadata.get("ignored_when") or f.metadata.get("idle_when")
        if why and value != f.default and (reason := why(value)):
            said.append(f"{f.name}: {yaml_text(value)} has no effect: {reason}")
    return said


def _check(spec: OperatorSpec, key: str, value: Any, hint: Any, meta: Mapping[str, Any]) -> tuple[Problem | None, Any]:
    if not is_a(value, hint):
        wanted = f"the name of an op of {spec.name} ({', '.join(spec.ops)})" if meta.get("op") else describe_type(hint)
        written = f"'{value}'" if isinstance(value, str) else yaml_text(value)
        return Problem(key, "type", f"`{key}` must be {wanted}, not {written}"), value
    least = meta.get("minimum")
    if least is not None and isinstance(value, int | float) and value < least:
        return Problem(key, "value", f"`{key}` must be at least {least}, not {yaml_text(value)}"), value
    if meta.get("device") and value is not None:
        try:
            value = canonical_device(value)
        except ValueError as error:
            return Problem(key, "value", f"`{key}`: {error}"), value
    if meta.get("op") and value is not None and value not in spec.ops:
        former = {name: op.name for op in spec.ops.values() for name in op.formerly}
        near = former.get(str(value)) or nearest(str(value), spec.ops)
        known = ", ".join(spec.ops)
        hint_text = f" (did you mean {near}?)" if near else ""
        return Problem(
            key, "value", f"`{key}`: unknown op {yaml_text(value)} of {spec.name}; known: {known}{hint_text}", near
        ), value
    return None, value


def is_a(value: Any, hint: Any) -> bool:
    """Whether a value read from YAML is of an annotated type; a whole number is a number, true and false are none."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(is_a(value, part) for part in typing.get_args(hint))
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint))
    if origin is dict:
        key_type, value_type = typing.get_args(hint)
        return isinstance(value, dict) and all(is_a(k, key_type) and is_a(v, value_type) for k, v in value.items())
    if hint is type(None):
        return value is None
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def describe_type(hint: Any) -> str:
    """A type in words for a message: "true or false", "a whole number", "one of 'a', 'b'"."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(part) for part in typing.get_args(hint))
    if origin is Literal:
        choices = typing.get_args(hint)
        return "one of " + ", ".join(repr(c) for c in choices) if len(choices) > 1 else repr(choices[0])
    if origin is dict:
        key_type, value_type = typing.get_args(hint)
        return f"a mapping of {describe_type(key_type)} to {describe_type(value_type)}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "null"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """The known word most like `word`, or "" when none is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else ""


@cache
def option_names(config: type[OperatorConfig]) -> dict[str, str]:
    """Every spelling of an option, to its field name."""
    names: dict[str, str] = {}
    for f in dataclasses.fields(config):
        for spelling in (f.name, *f.metadata.get("aliases", ())):
            names[spelling] = f.name
    return names


@cache
def field_types(config: type[OperatorConfig]) -> dict[str, Any]:
    hints = typing.get_type_hints(config)
    return {f.name: hints[f.name] for f in dataclasses.fields(config)}
