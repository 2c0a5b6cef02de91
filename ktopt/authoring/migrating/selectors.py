"""The simplest selector that takes what a list-form rule's name and class take, proved equal on every model given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktopt.authoring.migrating.regexes import exclusions, globs, read_alternative, split_alternatives
from ktopt.authoring.migrating.trees import Tree, same_everywhere
from ktopt.pattern.numbers import runs
from ktopt.ruleset import NameClass
from ktopt.selector.expression import PLAIN_VALUE

Layers = frozenset[int] | None
Parts = dict[str, Layers]
"""Selectors without their layers, any of which may hold, and the layers of each (None for every one)."""


@dataclass(frozen=True)
class Choice:
    """What a rule chooses: any of `parts`, of the class `cls` (a selector's value; None for any). `plain` if no regex is left."""

    parts: Mapping[str, Layers]
    cls: str | None
    plain: bool = True

    def joined(self, other: Choice) -> Choice:
        """Both together; they must be of one class."""
        parts: Parts = dict(self.parts)
        for part, layers in other.parts.items():
            mine = parts.get(part, frozenset())
            parts[part] = None if layers is None or mine is None else mine | layers
        return Choice(parts, self.cls, self.plain and other.plain)


def choose(match: NameClass, trees: Sequence[Tree]) -> Choice | None:
    """The choice that takes the same places of every model as name and class do; None where no selector is found."""
    cls = _class_value(match.cls, trees)
    if match.cls is not None and cls is None:
        return None
    if match.name is None:
        return Choice({}, cls)
    within = [tree.of_class(match.cls) for tree in trees]
    parts: Parts = {}
    plain = True
    try:
        alternatives = split_alternatives(match.name)
    except RecursionError:
        return None
    for alternative in alternatives:
        found = _of_alternative(alternative, trees, within)
        if found is None:
            found, plain = _as_regex(alternative), False
        text, layers = found
        old = parts.get(text, frozenset())
        parts[text] = None if layers is None or old is None else old | layers
    choice = Choice(parts, cls, plain)
    wanted = [tree.takes(match) for tree in trees]
    return choice if same_everywhere(trees, write(choice, trees), wanted, [t.index.everywhere for t in trees]) else None


def _class_value(written: str | None, trees: Sequence[Tree]) -> str | None:
    """The shortest name of a class that means the same."""
    if written is None:
        return None
    for name in (written.rpartition(".")[2], written):
        if PLAIN_VALUE.fullmatch(name) and all(tree.of_class(name) == tree.of_class(written) for tree in trees):
            return name
    return None


def _of_alternative(regex: str, trees: Sequence[Tree], within: Sequence[int]) -> tuple[str, Layers] | None:
    """One alternative as a selector without layers, and its layers."""
    found = read_alternative(regex, max(tree.last_layer + 1 for tree in trees))
    if found is None:
        return None
    base = [tree.search(found.base) for tree in trees]
    for glob in globs(found):
        if not same_everywhere(trees, _with_layers(glob, found.numbers, trees), base, within):
            continue
        text = glob
        left = [a & b for a, b in zip(base, within, strict=True)]
        for look_ahead, regex_of_one in zip(found.excluded, found.with_one, strict=True):
            kept = [tree.search(regex_of_one) for tree in trees]
            gone = [places & ~keep for places, keep in zip(left, kept, strict=True)]
            if not any(gone):
                continue
            excluded = next((x for x in exclusions(look_ahead) if same_everywhere(trees, x, gone, left)), None)
            if excluded is None:
                return None
            text += f" - {excluded}"
        return text, found.numbers
    return None


def _as_regex(regex: str) -> tuple[str, Layers]:
    """The faithful form: `~` matches whole paths, where a rule's name is searched in them."""
    before = "" if regex.startswith("^") else ".*"
    after = "" if regex.endswith("$") and not regex.endswith("\\$") else ".*"
    body = regex.removeprefix("^").removesuffix("$") if not after else regex.removeprefix("^")
    return f"path ~ /{before}{body.replace('/', chr(92) + '/')}{after}/", None


def write(choice: Choice, trees: Sequence[Tree]) -> str:
    """A choice as a selector's text."""
    parts = [_with_layers(text, layers, trees) for text, layers in choice.parts.items()]
    by_class = [f"class={choice.cls}"] if choice.cls is not None else []
    if len(parts) != 1:
        return " & ".join([f"({' | '.join(parts)})"] * bool(parts) + by_class) if by_class else " | ".join(parts)
    head, *excluded = parts[0].split(" - ")
    return " - ".join([" & ".join([head, *by_class]), *excluded])


def _with_layers(text: str, layers: Layers, trees: Sequence[Tree]) -> str:
    ranges = layer_ranges(layers, trees)
    if not ranges:
        return text
    head, *excluded = text.split(" - ")
    return " - ".join([f"{head} & {ranges}", *excluded])


def layer_ranges(layers: Layers, trees: Sequence[Tree]) -> str:
    """`layer in 0..7` and the like; "" where these are all layers of every model. A range that reaches the last layer is open."""
    if layers is None:
        return ""
    last = max(tree.last_layer for tree in trees)
    found = runs(layers)
    if found == [(0, last)]:
        return ""
    texts = [f"{a}.." if b == last and a < b else str(a) if a == b else f"{a}..{b}" for a, b in found]
    return f"layer={texts[0]}" if texts[0].isdigit() and len(texts) == 1 else f"layer in {', '.join(texts)}"
