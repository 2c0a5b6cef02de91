"""Models as a migration sees them: sets of places by regex, class and selector."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from ktopt.diagnostics import Report
from ktopt.graph import ModuleGraph
from ktopt.pattern import PatternError, PatternTimeout, compile_pattern
from ktopt.ruleset import NameClass, Rule, RuleSet
from ktopt.selector import parse_selector
from ktopt.source import FILE_START, Origin
from ktopt.treeindex import index_of, is_a, set_of

_NOWHERE = Origin("", FILE_START)


class Tree:
    """One model. Sets are ints of bits over the places of its TreeIndex: every module by each of its paths."""

    def __init__(self, graph: ModuleGraph) -> None:
        self.graph, self.index = graph, index_of(graph)
        self.searched: dict[str, int] = {}
        self.classed: dict[str, int] = {}
        self.selected: dict[str, int | None] = {}

    def search(self, regex: str) -> int:
        """The places in whose path the regex is found; none for what is no regex. PatternTimeout where it takes too long."""
        found = self.searched.get(regex)
        if found is None:
            try:
                find = compile_pattern(regex).finder
                places = (place for path, at in self.index.paths.items() if find(path) for place in at)
                found = set_of(places, self.index.places)
            except PatternError:
                found = 0
            self.searched[regex] = found
        return found

    def of_class(self, written: str | None) -> int:
        """The places of modules of a class; all for None."""
        if written is None:
            return self.index.everywhere
        if written not in self.classed:
            modules = self.index.by_class(lambda module: is_a(written, module))
            self.classed[written] = self.index.places_of(modules)
        return self.classed[written]

    def select(self, text: str) -> int | None:
        """The places that a selector takes; None where it isn't one."""
        if text not in self.selected:
            selector = parse_selector(text, _NOWHERE, {}, Report())
            try:
                found = selector.evaluate_places(self.index, self.graph.config) if selector else None
            except (PatternError, PatternTimeout):
                found = None
            self.selected[text] = found
        return self.selected[text]

    def takes(self, match: NameClass) -> int:
        """The places that a list-form rule's clauses take."""
        by_class = self.of_class(match.cls)
        return by_class if match.name is None or not by_class else by_class & self.search(match.name)

    @cached_property
    def last_layer(self) -> int:
        return self.graph.layer_count - 1


def same_everywhere(trees: Iterable[Tree], selector: str, wanted: Iterable[int], within: Iterable[int]) -> bool:
    """Whether a selector takes the wanted places of each model, looking only at those `within`."""
    for tree, places, limit in zip(trees, wanted, within, strict=True):
        found = tree.select(selector)
        if found is None or found & limit != places & limit:
            return False
    return True


def likely_models(ruleset: RuleSet) -> list[ModuleGraph]:
    """The shipped models that a list-form file was written for: they have classes that it names, and its rules fit them best."""
    from ktopt.models.shipped import ALSO_CALLED
    from ktopt.trees import known_models, load_tree

    trees = [Tree(load_tree(name)) for name in known_models() if name not in ALSO_CALLED]
    own = {cls for rule in ruleset.rules if (cls := _match(rule).cls) is not None and not cls.startswith("torch.")}
    if own:
        trees = [tree for tree in trees if any(tree.of_class(cls) for cls in own)]
    ranked = [(_misfit(ruleset, tree), tree) for tree in trees]
    least = min((misfit for misfit, _ in ranked), default=(0, 0))
    return [tree.graph for misfit, tree in ranked if misfit == least and misfit[0] < len(ruleset.rules)]


def _misfit(ruleset: RuleSet, tree: Tree) -> tuple[int, int]:
    """How many of the rules take nothing, and how many layers come after the last in which one takes something."""
    taken = [tree.takes(_match(rule)) for rule in ruleset.rules]
    together = 0
    for places in taken:
        together |= places
    reached = max((layer for layer, places in tree.index.layers.items() if places & together), default=tree.last_layer)
    return sum(not places for places in taken), tree.last_layer - reached


def _match(rule: Rule) -> NameClass:
    assert isinstance(rule.match, NameClass)
    return rule.match
