"""The one form that both rule languages compile to. Later stages know nothing of YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ktopt.source import Origin

if TYPE_CHECKING:
    from ktopt.operator import OperatorConfig, OperatorSpec
    from ktopt.selector import Selector


@dataclass(frozen=True, slots=True)
class NameClass:
    """Upstream's match: `name` is searched as a regex in the module's path, `cls` is an is-instance test; both must hold."""

    name: str | None
    cls: str | None
    name_origin: Origin | None = None
    cls_origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a rule puts in a module's place.

    operator        the resolved operator ("default" keeps the module and only places it)
    written         its name as the file has it
    config          typed kwargs, defaults filled in
    given           the kwargs as written, by canonical key
    kwarg_origins   where each given kwarg stands
    """

    operator: OperatorSpec
    written: str
    config: OperatorConfig
    given: Mapping[str, Any]
    origin: Origin
    kwarg_origins: Mapping[str, Origin] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `index` is its precedence (0 first); `id` is the file's own or "rule-1", "rule-2", ...; `number` counts from 1."""

    index: int
    id: str
    match: NameClass | Selector
    replace: Replacement
    origin: Origin
    match_origin: Origin
    recursive: bool = True
    when: Selector | None = None
    expect: int | None = None
    expect_origin: Origin | None = None

    @property
    def number(self) -> int:
        return self.index + 1


@dataclass(frozen=True, slots=True)
class Place:
    """One line of a native file's `place:` map: these modules live on this device unless a rule's kwargs say otherwise."""

    device: str
    selector: Selector
    origin: Origin


@dataclass(frozen=True, slots=True)
class Auto:
    """`place: auto`, or in a map `auto: rest`: what nothing else places goes where ktopt finds it best for the machine."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class RuleSet:
    """A whole rule file, imports included, in order of precedence.

    form            "list" (KTransformers' language) or "native"
    path, digest    the file's path as given, and a sha256 over its text and its imports' texts
    dtype           the dtype that weights are dequantised to, if the file says so
    default_device  where unplaced modules go: cuda:0 for list files (as upstream), cpu for native ones
    architectures   what it was written for; empty means any
    auto            what `place:` leaves to ktopt; its origin is where that stands
    long_context, kvc2   what a native file's sections of these names say, as config.py has them, by the fields' names
    """

    form: str
    path: str
    digest: str
    rules: tuple[Rule, ...]
    places: tuple[Place, ...] = ()
    architectures: tuple[str, ...] = ()
    architectures_origin: Origin | None = None
    dtype: str | None = None
    default_device: str = "cpu"
    origin: Origin | None = None
    default_device_origin: Origin | None = None
    long_context: Mapping[str, Any] = field(default_factory=dict)
    kvc2: Mapping[str, Any] = field(default_factory=dict)
    auto: Auto | None = None

    @property
    def asks_storage(self) -> bool:
        """Whether a rule or a place asks how weights are stored."""
        selectors = [rule.match for rule in self.rules if not isinstance(rule.match, NameClass)]
        return any(selector.asks_storage for selector in (*selectors, *(place.selector for place in self.places)))


def rule_devices(ruleset: RuleSet, rule: Rule, place: str, placed: bool = False) -> tuple[str, str]:
    """(generate, prefill) of a rule's modules in a place. `placed` where a native file's `place:` gave the place: a device that the
    rule doesn't give is then that one. Upstream's operators prefilled on the default device unless told otherwise; those with one
    device for all (`device`) prefill there."""
    spec, config, upstream = rule.replace.operator, rule.replace.config, ruleset.form == "list"
    generate = getattr(config, "generate_device", None) or getattr(config, "device", None)
    generate = generate or (spec.upstream_device if upstream else "") or place
    prefill = getattr(config, "prefill_device", generate)
    prefill = prefill or (place if spec.name != "default" and (placed or upstream) else generate)
    return generate, prefill
