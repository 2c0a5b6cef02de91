"""What a tree has that is most like a class or a word of a pattern that it hasn't."""

from __future__ import annotations

import difflib
import re

from ktopt.graph import ROLE_SUFFIXES, ModuleGraph
from ktopt.operator import nearest
from ktopt.treeindex import index_of

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NEGATIVE = re.compile(r"\(\?<?![^()]*\)")
_ESCAPE = re.compile(r"\\.")
_TYPOGRAPHIC = re.compile("[\u2018\u2019\u201c\u201d]")
_ALIKE = 0.8
"""From which likeness on two classes' names are taken for one, misspelt; those that play one part are from 0.6 on."""


def segments(graph: ModuleGraph) -> set[str]:
    """Every segment of every path, aliases included."""
    return {part for m in graph for path in (m.path, *m.alias_paths) for part in path.split(".")}


def near_class(written: str, graph: ModuleGraph) -> str:
    """The class that was probably meant, in the spelling nearest to the one written; "" where none is like it."""
    names: dict[str, str] = {}
    for example, _ in index_of(graph).classes:
        for dotted in (example.cls.name, *example.alias_classes):
            names.setdefault(dotted.rpartition(".")[2], dotted)
    simple = written.rpartition(".")[2]
    near = next((name for name in names if name.lower() == simple.lower()), "") or _alike(simple, names)
    if not near:
        return ""
    if "." not in written:
        return near
    dotted = names[near]
    short = written.startswith("torch.nn.") and not written.startswith("torch.nn.modules.")
    return f"torch.nn.{near}" if short and dotted.startswith("torch.nn.modules.") else dotted


def _alike(simple: str, names: dict[str, str]) -> str:
    """The most similar name, unless it is a class of another part that is merely called after the same model."""
    for name in difflib.get_close_matches(simple, list(names), n=5, cutoff=0.6):
        known, role = part_of_name(name), part_of_name(simple)
        likeness = difflib.SequenceMatcher(None, simple, name).ratio()
        if (role and role == known) or (likeness >= _ALIKE and not (role and known)):
            return name
    return ""


def part_of_name(simple: str) -> str:
    """The part that modules of a class play, by its name alone; "" where that doesn't tell."""
    return next((role for role, suffixes in ROLE_SUFFIXES if simple.endswith(suffixes)), "")


def near_segment(word: str, graph: ModuleGraph) -> str:
    """That no path has a word, and the segment that is most like it."""
    near = nearest(word, segments(graph))
    return f"no path has {word}; did you mean {near}?" if near else f"no path has {word}"


def near_words(name: str, graph: ModuleGraph) -> str:
    """What is nearest to a word of the pattern that is part of no path, or no segment of one where the pattern asks for a whole."""
    if (mark := _TYPOGRAPHIC.search(name)) is not None:
        return f"the pattern holds a typographic quotation mark, {mark[0]}, which no path has; quotes are ' and \""
    if "/" in name:
        return f"paths are written with dots: write {name.replace('/', chr(92) + '.')}"
    known = segments(graph)
    text = _NEGATIVE.sub(lambda m: " " * len(m[0]), name)
    text = _ESCAPE.sub("  ", text)
    for word in _WORD.finditer(text):
        if len(word[0]) > 1 and not any(_fits(name, word, segment) for segment in known):
            return near_segment(word[0], graph)
    return "each part of it occurs in some path, but not together in one; see the tree with `ktopt inspect`"


def _fits(pattern: str, word: re.Match[str], segment: str) -> bool:
    """Whether a segment has the word, at its start and its end where the pattern says so."""
    begins = pattern[: word.start()].endswith(("^", "\\."))
    ends = pattern.startswith(("$", "\\."), word.end())
    if begins and ends:
        return segment == word[0]
    return segment.startswith(word[0]) if begins else segment.endswith(word[0]) if ends else word[0] in segment
