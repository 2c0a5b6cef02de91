"""A plan's modules as a tree in which what repeats stands once: 58 layers that are treated alike are one branch of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktopt.folding import number_ranges
from ktopt.plan import Plan, Step


@dataclass(frozen=True, slots=True)
class Group:
    """Modules of one place in the tree that a plan treats alike, with all that is below them, and whose paths differ in numbers.

    name        the last part of the pattern: "layers", "{3..60}", "" for the root
    pattern     of the paths: "model.layers.{3..60}"; it stands for exactly these
    paths       in the order of the tree
    step        the first one's; the others' differ from it in path, `inside`, `alias`, `notes` and `weight_bytes` alone
    own_nbytes  bytes of their own tensors, all modules of the group together and each replica counted
    nbytes      own_nbytes and those of everything below
    children    what is below them, in the order of the tree
    """

    name: str
    pattern: str
    paths: tuple[str, ...]
    step: Step
    own_nbytes: int
    nbytes: int
    children: tuple[Group, ...]

    @property
    def count(self) -> int:
        """How many modules it stands for."""
        return len(self.paths)

    def walk(self) -> Iterator[Group]:
        """Itself and all groups below, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def fold_plan(plan: Plan, everything: bool = False, *, unfold: bool = False) -> Group:
    """The plan's tree, from its root. Numbered siblings stand in one group where they and all below them are treated alike, whether
    their numbers follow each other or not.

    Without `everything`, modules that have no weights, no rule and nothing of that below them are left out, and what lies inside a
    `recursive: false` module counts as that module's own. With `unfold`, each module is a group by itself.
    """
    tree = _Tree(plan, everything, unfold)
    return tree.group((0,), "", "")


def treatment(step: Step) -> tuple[Any, ...]:
    """What a plan makes of a module: equal for modules that are treated alike. It can be hashed."""
    return (
        step.operator,
        step.rule,
        step.generate_device,
        step.prefill_device,
        step.dtype,
        step.replicas,
        step.stored,
        repr(_kwargs(step)) if step.kwargs else "",
        tuple((asked, op) for asked, (op, _) in step.runs.items()) if step.runs else (),
        step.path.count(".", len(step.inside)) if step.inside else 0,
    )


def _kwargs(step: Step) -> Mapping[str, Any]:
    """Which experts are hot differs from layer to layer, and is told as that some are."""
    return {**step.kwargs, "hot_experts": True} if step.kwargs.get("hot_experts") else step.kwargs


class _Tree:
    """The modules of a plan by number, parents before children, and for each a key that is equal where whole subtrees are alike."""

    def __init__(self, plan: Plan, everything: bool, unfold: bool) -> None:
        self.plan, self.unfold = plan, unfold
        self.steps: list[Step] = []
        self.names: list[str] = []
        self.parents: list[int] = []
        self.nbytes: list[int] = []
        self.index: dict[str, int] = {}
        self._add("", self._container(""))
        for step in plan.steps:
            nbytes = step.weight_bytes * (1 + len(step.replicas))
            number = self.index.get(step.inside) if step.inside and not everything else None
            if number is None:
                number = self._add(step.path, step)
            self.nbytes[number] += nbytes
        self.children: list[list[int]] = [[] for _ in self.steps]
        self.keys = self._keys(everything)

    def _add(self, path: str, step: Step) -> int:
        """The number of a module, and of ancestors that the plan lacks: a plan made by hand may."""
        found = self.index.get(path)
        if found is not None:
            self.steps[found] = step
            return found
        above, _, name = path.rpartition(".")
        parent = -1
        if path:
            parent = self.index[above] if above in self.index else self._add(above, self._container(above))
        number = self.index[path] = len(self.steps)
        self.steps.append(step)
        self.names.append(name)
        self.parents.append(parent)
        self.nbytes.append(0)
        return number

    def _container(self, path: str) -> Step:
        device = self.plan.default_device
        return Step(path, "", "container", "default", {}, device, device, self.plan.dtype, 0)

    def _keys(self, everything: bool) -> list[int]:
        """Children are found on the way, from the last module to the first: those that are kept, in their order."""
        seen: dict[Any, int] = {}
        keys = [0] * len(self.steps)
        for number in range(len(self.steps) - 1, -1, -1):
            step, children = self.steps[number], self.children[number]
            children.reverse()
            if number and (everything or children or step.rule is not None or self.nbytes[number] or step.operator != "default"):
                self.children[self.parents[number]].append(number)
            below = tuple([(self.names[child], keys[child]) for child in children])
            keys[number] = seen.setdefault((step.cls, treatment(step), below), len(seen))
        return keys

    def group(self, numbers: Sequence[int], name: str, pattern: str) -> Group:
        """The group of these modules, whose subtrees are alike."""
        first = numbers[0]
        places: dict[Any, list[int]] = {}
        for place, child in enumerate(self.children[first]):
            numbered = _is_number(self.names[child]) and not self.unfold
            places.setdefault(self.keys[child] if numbered else self.names[child], []).append(place)
        children = []
        for at in places.values():
            names = [self.names[self.children[first][place]] for place in at]
            part = number_ranges(map(int, names)) if len(names) > 1 else names[0]
            below = [self.children[number][place] for number in numbers for place in at]
            children.append(self.group(below, part, f"{pattern}.{part}" if pattern else part))
        own = sum(self.nbytes[number] for number in numbers)
        paths = tuple(self.steps[number].path for number in numbers)
        return Group(name, pattern, paths, self.steps[first], own, own + sum(c.nbytes for c in children), tuple(children))


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0")
