"""Placing: from a rule set to the same rule set with a `place:` map that puts every module somewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from ktopt.diagnostics import KtoptError, Report
from ktopt.graph import ModuleGraph
from ktopt.placement import Hardware
from ktopt.placing.nothing import why_nothing_fits
from ktopt.placing.problem import Assignment, held_bytes, time_us
from ktopt.placing.solve import solve
from ktopt.placing.splits import Hot, with_hot, without_hot
from ktopt.placing.units import Case, make_case
from ktopt.placing.writing import Line, place_lines
from ktopt.plan import Plan
from ktopt.plan_options import PlanOptions
from ktopt.popularity import Popularity
from ktopt.ruleset import Place, RuleSet
from ktopt.selector import parse_selector
from ktopt.selector.surroundings import Storage, Surroundings
from ktopt.source import Origin
from ktopt.treeindex import index_of, members
from ktopt.weights.source import StoredTensor

DEFAULT_CONTEXT = 4096
"""Tokens that there is to be room for where nobody says."""
AUTO_NOTE = "place: auto"
"""What a plan's note of that begins with."""


class NothingFits(KtoptError):
    """No placement fits. `help` says what would."""

    def __init__(self, message: str, help: str) -> None:
        super().__init__(f"{message}\n  help: {help}")
        self.message, self.help = message, help


@dataclass(frozen=True)
class Placing:
    """A placement: the case, which device each item is on, the estimated time of a decoded token, what each device then holds
    (cache and passing memory included), whether none is better, the lines of the map, and hot experts by rule and layer (None where
    nothing is known of how often they are chosen)."""

    case: Case
    assignment: Assignment
    token_us: float
    held: Mapping[str, int]
    proved: bool
    lines: tuple[Line, ...]
    hot: Hot | None = None


def place(
    ruleset: RuleSet,
    graph: ModuleGraph,
    hardware: Hardware,
    options: PlanOptions,
    stored: Mapping[str, StoredTensor] | None = None,
    context: int | None = None,
    popularity: Popularity | None = None,
    after: Callable[[Plan], Plan] = lambda plan: plan,
) -> Placing:
    """The best placement of what a native rule set leaves free, with `popularity` of single experts too. `after` is what is made
    of a plan before it runs. NothingFits where none fits; KtoptError where the model or its pins can't be placed, or the solver is
    missing."""
    tokens = context or DEFAULT_CONTEXT

    def case_of(tokens: int) -> Case:
        return make_case(ruleset, graph, hardware, options, stored, tokens, popularity, after)

    case = case_of(tokens)
    solution = solve(case.problem)
    if popularity is not None:  # layers that aren't split need less for a moment
        whole = make_case(without_hot(ruleset), graph, hardware, options, stored, tokens, after=after)
        found = solve(whole.problem)
        if found is not None and (
            solution is None or time_us(whole.problem, found.assignment) < time_us(case.problem, solution.assignment)
        ):
            case, solution = replace(whole, chosen=case.chosen), found
    if solution is None:
        raise NothingFits(*why_nothing_fits(case, hardware.name, case_of, bool(ruleset.places)))
    problem, assignment = case.problem, solution.assignment
    return Placing(
        case,
        assignment,
        time_us(problem, assignment),
        dict(zip(problem.devices, held_bytes(problem, assignment), strict=True)),
        solution.proved,
        tuple(_lines(ruleset, graph, hardware, case, assignment, stored)),
        None if popularity is None else _hot(case, assignment),
    )


def place_automatically(
    ruleset: RuleSet,
    graph: ModuleGraph,
    hardware: Hardware,
    options: PlanOptions,
    stored: Mapping[str, StoredTensor] | None,
    report: Report,
    after: Callable[[Plan], Plan] = lambda plan: plan,
) -> tuple[RuleSet, str]:
    """The rule set with a map in the place of `place: auto`, and what a plan has to say of it. KT506 where nothing fits, and the
    rule set without a map."""
    assert ruleset.auto is not None
    tokens = options.context or max(DEFAULT_CONTEXT, options.room or 0)
    try:
        placing = place(ruleset, graph, hardware, options, stored, tokens, options.popularity, after)
    except NothingFits as error:
        report.error("KT506", error.message, ruleset.auto.origin, help=error.help)
        return replace(ruleset, auto=None), ""
    return placed(ruleset, placing), f"{AUTO_NOTE} made room for a context of {tokens:,} tokens"


def placed(ruleset: RuleSet, placing: Placing) -> RuleSet:
    """The rule set with the placement's lines behind its own, and its hot experts in its rules."""
    if placing.hot is not None:
        ruleset = with_hot(ruleset, placing.hot)
    assert ruleset.auto is not None
    origin = ruleset.auto.origin
    return replace(ruleset, auto=None, places=(*ruleset.places, *(_place(line, origin) for line in placing.lines if line.added)))


def _place(line: Line, origin: Origin) -> Place:
    selector = parse_selector(line.added, origin, {}, Report())
    assert selector is not None, line.added
    return Place(line.device, selector, origin)


def _hot(case: Case, assignment: Assignment) -> Hot:
    """Of each rule that makes experts which can be split, those that are hot, by layer."""
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for number, chosen in enumerate(case.chosen):
        if chosen is not None:
            layers = found.setdefault(chosen.rule, {})
            if (count := assignment.hot_of(number)) and chosen.module.layer is not None:
                layers[chosen.module.layer] = tuple(sorted(chosen.order[:count]))
    return found


def _lines(
    ruleset: RuleSet,
    graph: ModuleGraph,
    hardware: Hardware,
    case: Case,
    assignment: Assignment,
    stored: Mapping[str, StoredTensor] | None,
) -> list[Line]:
    names, wanted = case.problem.devices, dict[int, str]()
    for number, home in enumerate(assignment.homes):
        wanted.update(dict.fromkeys(case.homes[number], names[home]))
        experts = assignment.experts[number]
        wanted.update(dict.fromkeys(case.experts[number], names[home if experts is None else experts]))
    layers = zip(case.problem.items, assignment.homes, strict=True)
    first = next(home for item, home in layers if item.number is not None)
    rotary = [m.index for m in graph.modules if m.role == "rotary" and m.layer is None and m.index not in case.pins]
    wanted.update(dict.fromkeys(rotary, names[first]))
    free = [index for index in wanted if graph.modules[index].tensors or graph.modules[index].role in ("attention", "rotary")]
    pinned = {index: device for index, device in case.pins.items() if graph.modules[index].tensors}
    storage = {name: tensor.types for name, tensor in stored.items()} if stored is not None and ruleset.asks_storage else None
    written = [
        (p.device, p.selector.text, _taken(p, graph, hardware, storage)) for p in ruleset.places if p.origin.file == ruleset.path
    ]  # fmt: skip
    return place_lines(graph, {**pinned, **{i: wanted[i] for i in free}}, free, written)


def _taken(place: Place, graph: ModuleGraph, hardware: Hardware, storage: Storage | None) -> Collection[int]:
    found = place.selector.evaluate_places(index_of(graph), graph.config, Surroundings(hardware, storage))
    return [index for index in members(found) if index < len(graph)]
