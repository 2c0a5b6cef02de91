"""What the lines of a native file's `place:` take."""

from __future__ import annotations

from collections.abc import Sequence

from ktopt.diagnostics import Related, Report
from ktopt.match import Matches
from ktopt.pattern.numbers import in_words as in_numbers
from ktopt.ruleset import Place
from ktopt.selection.families import families, in_words, layers_in_words
from ktopt.selection.layers import report_beyond
from ktopt.selection.nothing import near_names
from ktopt.selection.terms import only_dead_term
from ktopt.selection.without import takes_somewhere
from ktopt.treeindex import index_of, members


def check_place(place: Place, matches: Matches, report: Report) -> None:
    """KT301 for a line that takes nothing, KT306 for one that names layers beyond the model, and infos for one whose modules
    earlier lines place: KT302 where they are all, KT303 where an earlier line overlaps this one."""
    if matches.placed is None:
        return
    at = matches.ruleset.places.index(place)
    takes = matches.placed.takes[at]
    if takes is None or (not takes and takes_somewhere(place.selector, matches.graph)):
        return
    if not takes:
        message = f"place {place.device} takes nothing: no module is in `{place.selector.text}`"
        origin, help = place.origin, near_names(place.selector, matches.graph)
        if term := only_dead_term(place.selector, matches.graph):
            message, origin = f"place {place.device} takes nothing: {term.message}", term.origin
        report.error("KT301", message, origin, help=help)
        return
    report_beyond(f"place {place.device}", place.selector.layers_written, place.origin, matches.graph, report)
    earlier = zip(matches.ruleset.places[:at], matches.placed.takes[:at], strict=True)
    sharing = [(other, taken) for other, taken in earlier if taken is not None and taken & takes]
    left = takes
    for _, taken in sharing:
        left &= ~taken
    if not left:
        message = f"place {place.device} gets nothing: all that it takes is placed by {_named(sharing)}"
        report.info("KT302", message, place.origin, related=_related(sharing))
        return
    crossing = [(other, taken) for other, taken in sharing if taken & ~takes]  # one that is inside this one is its exception
    if crossing:
        modules = index_of(matches.graph).modules_at
        lost = 0
        for _, taken in crossing:
            lost |= modules(taken & takes)
        message = f"place {place.device} takes {in_words(matches.graph, members(lost))} too, which {_named(crossing)} places"
        report.info("KT303", f"{message}: the first line that takes a module does", place.origin, related=_related(crossing))


def _named(lines: Sequence[tuple[Place, int]]) -> str:
    return " and ".join(f"place {place.device} (line {place.origin.span.start.line})" for place, _ in lines)


def _related(lines: Sequence[tuple[Place, int]]) -> list[Related]:
    return [Related(f"{place.device} takes some of them", place.origin) for place, _ in lines]


def check_place_gaps(matches: Matches, report: Report) -> None:
    """KT309 for layers that no line places though lines place layers before and after them: a warning, unless they are as many as
    those that are placed, or the file says where what is left goes."""
    if matches.placed is None or matches.ruleset.default_device_origin is not None or None in matches.placed.takes:
        return
    left: set[int] = set()
    placed: dict[int, str] = {}
    for family in families(module for module, _ in matches.open if module.tensors):
        devices = {layer: matches.decisions[module.index].place for layer, module in family.by_layer.items()}
        given = {layer: device for layer, device in devices.items() if device}
        free = {layer for layer in devices if layer not in given and not _has_device(family.by_layer[layer].index, matches)}
        inside = {layer for layer in free if given and min(given) < layer < max(given)}
        if inside and len(inside) < len(given) and set(given.values()) != {matches.ruleset.default_device}:
            left |= inside
            placed.update(given)
    if not left:
        return
    after = placed[min(layer for layer in placed if layer > min(left))]
    late = next(place for place in matches.ruleset.places if place.device == after)
    are, go = ("is", "it goes") if len(left) == 1 else ("are", "they go")
    others = in_numbers(set(placed) - left)
    message = (
        f"{layers_in_words(left)} {are} placed by no line of `place:` while {others} are: {go} to {matches.ruleset.default_device}"
    )
    help = f"add {layers_in_words(left)} to a line of `place:`, such as this one"
    report.warning("KT309", message, late.origin, help=help)


def _has_device(index: int, matches: Matches) -> bool:
    """Whether a rule that takes a module says where it goes."""
    rule = matches.decisions[index].rule
    return rule is not None and bool({"generate_device", "device"} & set(matches.ruleset.rules[rule].replace.given))
