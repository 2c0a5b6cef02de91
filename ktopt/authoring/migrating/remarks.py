"""What the author of a list-form file said in comments, and where it belongs in the native file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ktopt.authoring.commented import Collection, Leaf, Member, read_commented
from ktopt.source import SourceFile

_OF_LAYERS = re.compile(r"\b(?:gpu|cuda|layers?)\W*\d", re.IGNORECASE)
_ON_REGEXES = re.compile(r"#\s*regular expression\s*", re.IGNORECASE)


@dataclass
class Remarks:
    """The comments of one rule.

    above    those on lines of their own, in order; "" parts them
    beside   those at the ends of lines, by the key of a native rule that says what the line said
    options  the kwargs that have a comment of their own
    transfers   those of its transfer_map
    """

    above: list[str] = field(default_factory=list)
    beside: dict[str, list[str]] = field(default_factory=dict)
    options: set[str] = field(default_factory=set)
    transfers: list[str] = field(default_factory=list)

    @property
    def of_layers(self) -> str:
        """The last comment above the rule where it tells which layers, or which GPU, the rule is for."""
        last = self.above[-1] if self.above else ""
        return last if _OF_LAYERS.search(last) else ""

    def add(self, other: Remarks, *, layers: bool = True) -> None:
        """Take another rule's comments too, each text once; without `layers` not the one that tells which layers it took."""
        left_out = "" if layers else other.of_layers
        taken = [text for text in other.above if not text or (text != left_out and text not in self.above)]
        if any(taken):
            self.above += [*([""] if self.above else []), *taken]
        for key, texts in other.beside.items():
            mine = self.beside.setdefault(key, [])
            mine += [text for text in texts if text not in mine]


def read_remarks(source: SourceFile) -> tuple[list[Remarks], list[str]]:
    """The comments of each rule of a list-form file, and those after the last."""
    document = read_commented(source)
    root = document.root
    if not isinstance(root, Collection):
        return [], document.loose
    return [_of_rule(member) for member in root.members], [*root.below, *document.loose]


_OLD_RULE = re.compile(r"#+\s*-\s*(match|replace)\s*:")
_OF_RULE = re.compile(
    r"#+\s*-?\s*(match|replace|recursive|kwargs|name|class|\w+_(device|op|map|threshold|prefill)|backend|transfer_map|\d+)\s*:"
)


def without_old_rules(lines: Sequence[str]) -> tuple[list[str], int]:
    """Comments without the rules that were commented out, which say nothing of this file; and how many those were."""
    kept: list[str] = []
    count, inside = 0, False
    for line in lines:
        begins = bool(_OLD_RULE.match(line))
        inside = begins or (inside and bool(_OF_RULE.match(line)))
        count += begins
        if not inside:
            kept.append(line)
    return kept, count


def _of_rule(rule: Member) -> Remarks:
    found = Remarks(list(rule.above))
    if isinstance(rule.value, Collection):
        for member in rule.value.members:
            _collect(member, member.key.text if member.key else "", found)
        found.above += rule.value.below
    return found


def _collect(member: Member, key: str, found: Remarks) -> None:
    """The comments of one of a rule's keys and of all below it."""
    name = member.key.text if member.key is not None else ""
    if (key, name) in (("replace", "kwargs"), ("kwargs", "transfer_map")):
        key = name
    texts = [text for text in member.beside if not _ON_REGEXES.fullmatch(text)]
    if key == "transfer_map":
        found.transfers += [*member.above, *texts]
    else:
        found.above += member.above
        if texts:
            found.beside.setdefault(key, []).extend(texts)
            found.options |= {name} if key == "kwargs" else set()
    if isinstance(member.value, Collection):
        for inner in member.value.members:
            _collect(inner, key, found)
        found.above += member.value.below
    else:
        assert isinstance(member.value, Leaf)


def tidy(lines: Iterable[str]) -> list[str]:
    """Comments with one blank line at most between them, and none at the ends."""
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    return kept
