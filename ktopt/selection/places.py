"""What the lines of a native file's `place:` take."""

from __future__ import annotations

from ktopt.diagnostics import Related, Report
from ktopt.match import Matches
from ktopt.ruleset import Place
from ktopt.selection.layers import report_beyond
from ktopt.selection.nothing import near_names
from ktopt.selection.without import takes_somewhere


def check_place(place: Place, matches: Matches, report: Report) -> None:
    """KT301 for a line that takes nothing, KT306 for one that names layers beyond the model, and KT302, an info, for one whose
    modules earlier lines place."""
    if matches.placed is None:
        return
    at = matches.ruleset.places.index(place)
    takes = matches.placed.takes[at]
    if takes is None or (not takes and takes_somewhere(place.selector, matches.graph)):
        return
    if not takes:
        message = f"place {place.device} takes nothing: no module is in `{place.selector.text}`"
        report.error("KT301", message, place.origin, help=near_names(place.selector, matches.graph))
        return
    report_beyond(f"place {place.device}", place.selector.layers_written, place.origin, matches.graph, report)
    earlier = zip(matches.ruleset.places[:at], matches.placed.takes[:at], strict=True)
    sharing = [(other, taken) for other, taken in earlier if taken is not None and taken & takes]
    left = takes
    for _, taken in sharing:
        left &= ~taken
    if not left:
        named = " and ".join(f"place {other.device} (line {other.origin.span.start.line})" for other, _ in sharing)
        related = [Related(f"{other.device} takes some of them", other.origin) for other, _ in sharing]
        message = f"place {place.device} gets nothing: all that it takes is placed by {named}"
        report.info("KT302", message, place.origin, related=related)
