"""Selectors that ask how weights are stored, where no weight file is at hand."""

from __future__ import annotations

from ktopt.diagnostics import Report
from ktopt.match import Matches
from ktopt.ruleset import NameClass
from ktopt.selection.rules import where
from ktopt.selector.fields import about_storage

HELP = "give --weights, or a GGUF file as the model"


def check_unsettled(matches: Matches, report: Report) -> None:
    """KT312 for each rule and place whose modules depend on how weights are stored."""
    for index in matches.needs_weights:
        rule = matches.ruleset.rules[index]
        if not isinstance(rule.match, NameClass):
            message = f"rule {rule.number} asks how weights are stored, and no weights are given: what it takes is not known"
            report.warning("KT312", message, where(rule), help=HELP)
    for place in matches.ruleset.places:
        if any(map(about_storage, place.selector.lacks(matches.around))):
            message = f"place {place.device} asks how weights are stored, and no weights are given: what it takes is not known"
            report.warning("KT312", message, place.origin, help=HELP)
