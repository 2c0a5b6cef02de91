"""Why a rule matches nothing in a tree, and what was probably meant."""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.clauses import give_up
from ktopt.diagnostics import Edit, Fix, Related
from ktopt.graph import ModuleGraph
from ktopt.match import Matches
from ktopt.operator import nearest, yaml_text
from ktopt.pattern import PatternTimeout, compile_pattern
from ktopt.pattern.check import literal_backslash
from ktopt.pattern.numbers import in_words as numbers_in_words
from ktopt.ruleset import NameClass, Rule
from ktopt.selection.families import in_words
from ktopt.selection.globs import glob_slip
from ktopt.selection.nearest import near_class, near_segment, near_words, part_of_name, segments
from ktopt.selector import Selector
from ktopt.selector.expression import Equal
from ktopt.selector.expression import Matches as MatchesRegex
from ktopt.selector.fields import Test, config_value, holds, tensor_values
from ktopt.source import Origin
from ktopt.treeindex import index_of, is_a, members


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnostic in the making."""

    code: str
    message: str
    origin: Origin
    help: str | None = None
    related: tuple[Related, ...] = ()
    fix: Fix | None = None


def explain_nothing(rule: Rule, matches: Matches) -> Finding:
    """The finding for a rule that selects no module: KT301, or KT306 or KT308 where that is the reason. KT304 where its pattern
    takes too long for that to be found out."""
    if isinstance(rule.match, NameClass):
        try:
            return _by_name_and_class(rule, rule.match, matches.graph)
        except PatternTimeout as error:
            give_up(rule, matches.graph, error)
            matches.failed.add(rule.index)
            return Finding("KT304", f"rule {rule.number}: {error}", rule.match.name_origin or rule.match_origin)
    selector = rule.match
    message = f"rule {rule.number} matches nothing: no module is in `{selector.text}`"
    help = near_names(selector, matches.graph) or glob_slip(selector, matches.graph)
    return Finding("KT301", message, rule.match_origin, help)


def near_names(selector: Selector, graph: ModuleGraph) -> str | None:
    """What is nearest to names in a selector that the tree doesn't have."""
    hints: list[str | None] = [_meant(near_class(c, graph)) for c in selector.classes_written if not _of_class(c, graph)]
    hints += [near_segment(s, graph) for s in selector.segments_written if s not in segments(graph)]
    hints += [_known_values(test, graph) for test in selector.tests]
    return "; ".join(h for h in hints if h) or None


def _known_values(test: Test, graph: ModuleGraph) -> str | None:
    """What a test's field can be, where it is a config key that the model hasn't, or a value that no module has."""
    if test.field.startswith("config."):
        key = test.field.removeprefix("config.")
        value = config_value(graph.config, key)
        if value is not None:
            fails = not isinstance(test, MatchesRegex) and not holds(test, [value])
            return f"config.{key} of {_model(graph)} is {yaml_text(value)}" if fails else None
        near = nearest(key, graph.config)
        return f"{_model(graph)}'s config has no {key}" + (f"; did you mean config.{near}?" if near else "")
    if test.field != "dtype" or not isinstance(test, Equal):
        return None
    values = {str(value) for module in graph for value in tensor_values("dtype", module)}
    missing = [str(value) for value in test.values if value not in values]
    return f"no module has dtype={missing[0]}; there are {', '.join(sorted(values))}" if missing else None


def _by_name_and_class(rule: Rule, clauses: NameClass, graph: ModuleGraph) -> Finding:
    number, name, written = rule.number, clauses.name, clauses.cls
    name_origin = clauses.name_origin or rule.match_origin
    if name is not None and (at := literal_backslash(name)) is not None:
        message = (
            f"rule {number} matches nothing: at column {at + 1} its pattern asks for a literal backslash, and no path holds one"
        )
        return Finding(
            "KT308", message, name_origin, r"in single quotes, or without quotes, write \. once; in double quotes write \\."
        )
    of_class = _of_class(written, graph) if written is not None else list(range(len(graph)))
    if written is not None and not of_class:
        message = f"rule {number} matches nothing: no module of {_model(graph)} is a {written}"
        return _no_such_class(message, rule, clauses, graph)
    of_name = _of_name(name, graph) if name is not None else []
    if of_name and written is not None:
        message = (
            f"rule {number} matches nothing: its name takes {in_words(graph, of_name)}, none of which is a {written}; "
            f"that class is {in_words(graph, of_class)}"
        )
        return Finding("KT301", message, name_origin, f"the name takes a {graph.modules[of_name[0]].cls.name}")
    assert name is not None
    beyond = layers_beyond(name, graph)
    if beyond:
        message = (
            f"rule {number} takes only layers {numbers_in_words(beyond)}; {_model(graph)} has layers 0-{graph.layer_count - 1}"
        )
        return Finding("KT306", message, name_origin, "give numbers of layers that the model has")
    message = f"rule {number} matches nothing: no path of {_model(graph)} is matched by {name}"
    return Finding("KT301", message, name_origin, near_words(name, graph))


def _no_such_class(message: str, rule: Rule, clauses: NameClass, graph: ModuleGraph) -> Finding:
    """The class that was meant: one spelt like it, else one that the rule's name takes; else there may be none here."""
    written, place = clauses.cls or "", clauses.cls_origin
    near, help = near_class(written, graph), ""
    if not near and clauses.name is not None:
        at_name = {graph.modules[i].cls.simple_name: graph.modules[i].cls for i in _of_name(clauses.name, graph)}
        part = part_of_name(written.rpartition(".")[2])
        same = {name: cls for name, cls in at_name.items() if part and cls.role == part} or at_name
        if same and len(same) <= 3:
            help = f"modules at that name are {' or '.join(same)}"
            near = next(iter(same.values())).name if len(same) == 1 and same is not at_name else ""
            help += "" if near else "; where other modules are meant that this model hasn't, the rule can be deleted"
    help = help or _meant(near) or "where the model has no such modules, the rule has no use for it and can be deleted"
    fix = Fix(f"write {near}", (Edit(place.file, place.span, near),), safe=False) if near and place else None
    return Finding("KT301", message, place or rule.match_origin, help, fix=fix)


def _meant(near: str) -> str:
    return f"did you mean {near}?" if near else ""


def _model(graph: ModuleGraph) -> str:
    return graph.name or "this model"


def _of_class(written: str, graph: ModuleGraph) -> list[int]:
    return list(members(index_of(graph).by_class(lambda module: is_a(written, module))))


def _of_name(name: str, graph: ModuleGraph) -> list[int]:
    pattern = compile_pattern(name)
    return [m.index for m in graph if pattern.search(m.path)]


def layers_beyond(name: str, graph: ModuleGraph) -> list[int]:
    """The numbers past the model's last layer that the pattern would take, were there such layers. PatternTimeout."""
    count = graph.layer_count
    if not count:
        return []
    pattern = compile_pattern(name)
    last = [m.path for m in graph if m.layer == count - 1 and m.expert is None]
    return [
        number
        for number in range(count, count + 100)
        if any(pattern.search(f"{path}.".replace(f"layers.{count - 1}.", f"layers.{number}.", 1)[:-1]) for path in last)
    ]
