"""Why a module became what it is: the rule that won, why each other rule didn't, and where each kwarg came from.

`explain_module` gathers it as data; `Explanation.render` writes it for a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import Report, UsageError
from ktopt.folded import treatment
from ktopt.folding import fold_names
from ktopt.graph import Module, ModuleGraph
from ktopt.operator import nearest, yaml_text
from ktopt.pattern import compile_pattern
from ktopt.ruleset import NameClass, Rule, RuleSet
from ktopt.selector import parse_selector
from ktopt.selector.expression import AllOf, Equal, Expression, Minus, Order, Ref, Unequal
from ktopt.selector.expression import Matches as Regex
from ktopt.selector.fields import about_storage
from ktopt.source import FILE_START, Origin
from ktopt.treeindex import is_a

if TYPE_CHECKING:
    from ktopt.match import Decision, Matches
    from ktopt.plan import Plan, Step
    from ktopt.selector import Selector


@dataclass(frozen=True, slots=True)
class Lost:
    """A rule that did not decide. `clause` is what failed (name, class, selector, when, order, alias, closed), `reason` how."""

    number: int
    id: str
    origin: Origin
    clause: str
    reason: str


@dataclass(frozen=True, slots=True)
class Clause:
    """A clause of the rule that decided: its key (name, class, match, when, expect, recursive), its text, and where it stands."""

    key: str
    text: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class KwargSource:
    """One kwarg of the module's operator, and where its value came from: "rules.yaml:12", "default", "place at ..."."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that decided one module.

    asked       the path that was asked for, or a pattern of several; `path` is the module's own
    of          how many modules the pattern names, of which this is the first; 1 for a path
    otherwise   paths of those that the plan treats otherwise
    cls         the module's dotted class
    rule        the rule that won, None where none did
    alias       the older path by which the rule took it, or ""
    closed_by   path of the ancestor whose rule has `recursive: false`, or ""
    """

    asked: str
    path: str
    cls: str
    operator: str
    generate_device: str
    prefill_device: str
    replicas: tuple[str, ...]
    weight_bytes: int
    rule: Rule | None
    alias: str
    closed_by: str
    kwargs: tuple[KwargSource, ...]
    clauses: tuple[Clause, ...]
    lost: tuple[Lost, ...]
    notes: tuple[str, ...]
    of: int = 1
    otherwise: tuple[str, ...] = ()

    def render(self) -> str:
        return "\n".join(_lines(self)) + "\n"


def explain_module(path: str, ruleset: RuleSet, graph: ModuleGraph, matches: Matches, plan: Plan) -> Explanation:
    """Explain the module of `path`, or the one that has it as an older path; of a pattern such as "layers.{3..60}.mlp" the first.
    UsageError, with the nearest path, for none."""
    module, *others = find_modules(path, graph)
    decision = matches.decisions[module.index]
    step = plan.steps[module.index]
    rule = ruleset.rules[decision.rule] if decision.rule is not None else None
    closed_by = graph.modules[decision.closed_by].path if decision.closed_by is not None else ""
    return Explanation(
        asked=path,
        path=module.path,
        cls=module.cls.name,
        operator=step.operator,
        generate_device=step.generate_device,
        prefill_device=step.prefill_device,
        replicas=step.replicas,
        weight_bytes=step.weight_bytes,
        rule=rule,
        alias=decision.alias,
        closed_by=closed_by,
        kwargs=tuple(_kwargs(step, rule, decision, ruleset, plan)),
        clauses=tuple(_clauses(rule)) if rule else (),
        lost=tuple(_lost(module, decision, ruleset, graph, matches)),
        notes=step.notes,
        of=1 + len(others),
        otherwise=tuple(m.path for m in others if treatment(plan.steps[m.index]) != treatment(step)),
    )


def find_modules(path: str, graph: ModuleGraph) -> list[Module]:
    """The module of that path or older path, or those of a pattern, as selectors and `ktopt plan` have them. UsageError with the
    nearest path where there are none."""
    found = graph.find(path)
    if found is not None:
        return [found]
    if "{" in path or "*" in path:
        selector = parse_selector(f"@{path}", Origin("MODULE", FILE_START), {}, Report())
        taken = selector.evaluate(graph) if selector else 0
        if taken:
            return [module for module in graph.modules if taken >> module.index & 1]
    known = [*graph.by_path, *graph.by_alias]
    if not path.startswith("model.") and f"model.{path}" in graph.by_path:
        near = f"model.{path}"
    else:
        same_end = [p for p in known if p.rpartition(".")[2] == path.rpartition(".")[2]]
        near = nearest(path, same_end) or nearest(path, [p for p in known if abs(len(p) - len(path)) < 8])
    name = graph.name or "the model"
    raise UsageError(
        f"{name} has no module {path!r}" + (f"; did you mean {near}?" if near else f"; `ktopt inspect {name}` shows its modules")
    )


def _clauses(rule: Rule) -> Iterator[Clause]:
    """What the rule says of the modules that it takes."""
    if isinstance(rule.match, NameClass):
        if rule.match.name is not None:
            yield Clause("name", rule.match.name, rule.match.name_origin or rule.match_origin)
        if rule.match.cls is not None:
            yield Clause("class", rule.match.cls, rule.match.cls_origin or rule.match_origin)
    else:
        yield Clause("match", rule.match.text, rule.match_origin)
    if rule.when is not None:
        yield Clause("when", rule.when.text, rule.when.origin)
    if rule.expect is not None:
        yield Clause("expect", str(rule.expect), rule.expect_origin or rule.origin)
    if not rule.recursive:
        yield Clause("recursive", "false", rule.origin)


def _kwargs(step: Step, rule: Rule | None, decision: Decision, ruleset: RuleSet, plan: Plan) -> Iterator[KwargSource]:
    given: Mapping[str, Any] = rule.replace.given if rule else {}
    origins = rule.replace.kwarg_origins if rule else {}
    for name, value in step.kwargs.items():
        if name in given:
            source = str(origins.get(name, rule.replace.origin if rule else ""))
            if value != given[name] and str(value).partition(":")[0] != str(given[name]).partition(":")[0]:
                source += f", where it is {given[name]}; remapped"
        elif value is not None and name in ("generate_device", "prefill_device", "device"):
            source = _device_source(decision, ruleset, plan)
        else:
            source = "default"
        yield KwargSource(name, value, source)


def _device_source(decision: Decision, ruleset: RuleSet, plan: Plan) -> str:
    if decision.place is None:
        return f"default device, {plan.default_device}"
    lines = [p.origin for p in ruleset.places if p.device == decision.place]
    return f"place at {lines[0]}" if lines else f"place {decision.place}"


def _lost(module: Module, decision: Decision, ruleset: RuleSet, graph: ModuleGraph, matches: Matches) -> Iterator[Lost]:
    for rule in ruleset.rules:
        if rule.index == decision.rule:
            continue
        clause, reason = _failure(rule, module, decision, ruleset, graph, matches)
        yield Lost(rule.number, rule.id, rule.origin, clause, reason)


def _failure(
    rule: Rule, module: Module, decision: Decision, ruleset: RuleSet, graph: ModuleGraph, matches: Matches
) -> tuple[str, str]:
    """The clause by which a rule lost a module, and that in words."""
    active = matches.active[rule.index]
    if active is None:
        return "when", f"whether {rule.when} is not known: plan with --hardware"
    if not active:
        return "when", f"{rule.when} does not hold" + (f" on {matches.hardware.name}" if matches.hardware else "")
    if not matches.takes(rule.index) >> module.index & 1:
        return _mismatch(rule, module, matches)
    if decision.closed_by is not None:
        owner = graph.modules[decision.closed_by]
        index = matches.decisions[owner.index].rule
        who = f"rule {index + 1}" if index is not None else "a rule"
        return "closed", f"it fits, but {who} took {owner.path or 'the model'} with `recursive: false`, and so all below it"
    if rule.index in decision.alias_rules:
        device = getattr(rule.replace.config, "generate_device", None)
        return "alias", "it takes other older paths of this module, with the same operator" + (
            f": a copy on {device}" if device else ""
        )
    if decision.rule is not None and rule.index > decision.rule:
        return "order", f"it fits, but rule {decision.rule + 1} comes first"
    return "alias", f"it takes {module.path or 'the model'} itself, but rules that take its older paths decide"


def _mismatch(rule: Rule, module: Module, matches: Matches) -> tuple[str, str]:
    """Which clause of its match a rule misses a module by; both, where both fail."""
    if not isinstance(rule.match, NameClass):
        return "selector", "; ".join(_failing(rule.match.root, rule.match, module, matches))
    name, cls = rule.match.name, rule.match.cls
    failed: list[tuple[str, str]] = []
    if name is not None and not any(compile_pattern(name).search(path) for path in (module.path, *module.alias_paths)):
        older = ", nor in its older paths" if module.alias_paths else ""
        failed.append(("name", f"{name} is not found in {module.path or 'the empty path'}{older}"))
    if cls is not None and not is_a(cls, module):
        failed.append(("class", f"{cls} is none of {_classes(module)}"))
    return ", ".join(clause for clause, _ in failed), "; ".join(reason for _, reason in failed)


def _failing(part: Expression, selector: Selector, module: Module, matches: Matches) -> list[str]:
    """The smallest parts of a selector that keep a module out."""

    def holds(part: Expression) -> bool:
        around = matches.around
        return bool(replace(selector, root=part).evaluate(matches.graph, around.hardware, around.storage) >> module.index & 1)

    match part:
        case Ref():
            return [f"{text} (in {part})" for text in _failing(part.target, selector, module, matches)]
        case AllOf() if failing := [p for p in part.parts if not holds(p)]:
            return [text for p in failing for text in _failing(p, selector, module, matches)]
        case Minus() if not holds(part.parts[0]):
            return _failing(part.parts[0], selector, module, matches)
        case Minus():
            return [f"{p} takes it out" for p in part.parts[1:] if holds(p)]
        case Equal() | Unequal() | Regex() | Order() if matches.around.lacks(part.field):
            return [
                f"whether {part} holds is not known: {'give --weights' if about_storage(part.field) else 'plan with --hardware'}"
            ]
        case _:
            return [f"{part} does not hold"]


def _classes(module: Module) -> str:
    own = [name.rpartition(".")[2] for name in (*module.cls.mro, *module.alias_classes)]
    return ", ".join(name for name in dict.fromkeys(own) if name != "Module" or len(own) == 1)


def _lines(e: Explanation) -> Iterator[str]:
    home = e.rule.origin.file if e.rule else e.lost[0].origin.file if e.lost else ""
    yield f"{e.path or '(the model)'}  {e.cls}"
    if e.of > 1:
        rest = f"{len(e.otherwise)} are treated otherwise: {', '.join(fold_names(e.otherwise))}" if e.otherwise else "all alike"
        yield f"  the first of {e.of} modules of {e.asked}, {rest}"
    elif e.asked != e.path:
        yield f"  asked for {'as' if '{' in e.asked or '*' in e.asked else 'by its older path'} {e.asked}"
    if e.rule is not None:
        by = f", by its older path {e.alias}" if e.alias else ""
        yield f"  {_label(e.rule.number, e.rule.id)} at {e.rule.origin} decides{by}"
    elif e.closed_by:
        yield f"  part of {e.closed_by}, whose rule has `recursive: false`"
    else:
        yield "  no rule takes it"
    places = ", ".join((e.generate_device, *e.replicas))
    prefill = f" (prefill {e.prefill_device})" if e.prefill_device != e.generate_device else ""
    yield f"  {e.operator} on {places}{prefill}, {e.weight_bytes:,} bytes of its own"
    for note in e.notes:
        yield f"  note: {note}"
    yield from _columns("what it takes", [(f"{c.key}: {c.text}", _here(str(c.origin), home)) for c in e.clauses])
    yield from _columns("kwargs", [(f"{k.name} = {yaml_text(k.value)}", _here(k.source, home)) for k in e.kwargs])
    rows = [(_here(str(x.origin), home), _label(x.number, x.id), x.clause, x.reason) for x in e.lost]
    yield from _columns(f"other rules of {home}", rows)


def _columns(title: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A titled block of aligned columns; nothing where there are no rows."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield ""
    yield title
    for row in rows:
        yield ("  " + "  ".join(f"{cell:<{wide}}" for cell, wide in zip(row, widths, strict=True))).rstrip()


def _label(number: int, id: str) -> str:
    return f"rule {number}" if id == f"rule-{number}" else f"rule {number} ({id})"


def _here(place: str, home: str) -> str:
    """ "line 12" for a place in the rule file itself."""
    return place.replace(f"{home}:", "line ", 1) if home else place
