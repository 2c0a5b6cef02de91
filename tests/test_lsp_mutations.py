"""Rule files broken at random, and every request of the language server about them: no error, no place outside the text."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="the language server needs pygls")

from lsprotocol import types
from rulefiles import CASES

from ktopt.lsp import answers
from ktopt.lsp.analysis import Analyser
from ktopt.lsp.findings import file_uri, published
from ktopt.lsp.models import Models
from ktopt.lsp.project import Project
from ktopt.lsp.rules import Known
from ktopt.lsp.text import Shown, Text

ROOT = Path(__file__).parent.parent
FILES = [path.read_text(encoding="utf-8") for folder in (ROOT / "rules", CASES) for path in sorted(folder.rglob("*.yaml"))]
PIECES = [
    *("\n", "- ", "  ", "{", "}", "[", '"', "'", "\\", "#", "\r", "\t", "\0", "\u2028", "\U0001f600", "&a ", "*a ", "<<: "),
    *("match:", "kwargs:", "name: ", "class: ", "1: ", "@model.", "$x", " | ", "(.*)*", "{0.."),
    *("# ktopt: ignore[KT3", "let:\n  a: $a\n"),
]
INPUTS = 150


def mutated(chance: random.Random) -> str:
    """A rule file cut off, with pieces put in and characters taken out."""
    text = chance.choice(FILES)
    if chance.random() < 0.5:
        text = text[: chance.randrange(len(text) + 1)]
    for _ in range(chance.randrange(6)):
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice(PIECES) + text[at + chance.choice((0, 0, 1, 3, 20)) :]
    if chance.random() < 0.2:
        text = text.replace("\n", "\r\n")
    return "\ufeff" + text if chance.random() < 0.1 else text


def ranges(shown: Shown, chance: random.Random, analyser: Analyser) -> Iterator[types.Range]:
    """The ranges of all that is answered about a text, at some places of it."""
    analysis = analyser._analyse(shown, False)
    known = Known.of(analysis, None)
    for found in published(analysis, file_uri):
        yield found.range
    for _ in range(5):
        place = shown.text.position(chance.randrange(len(shown.text.text) + 1))
        hovered = answers.hovered(analysis, known, place)
        if hovered is not None and hovered.range is not None:
            yield hovered.range
        answers.definitions(analysis, known, place, file_uri)
        for item in answers.completions(shown, analysis, place, True):
            assert isinstance(item.text_edit, types.TextEdit)
            assert item.text_edit.range.start <= place <= item.text_edit.range.end
            assert item.text_edit.range.start.line == item.text_edit.range.end.line
            yield item.text_edit.range
        asked = types.CodeActionParams(types.TextDocumentIdentifier("x"), types.Range(place, place), types.CodeActionContext([]))
        for action in answers.code_actions(analysis, "x", asked, file_uri):
            changes = action.edit.changes if action.edit is not None else None
            yield from (edit.range for edit in (changes or {}).get("x", ()))
    for symbol in answers.symbols(analysis, known):
        yield symbol.range
    whole = types.Range(types.Position(0, 0), types.Position(10**6, 0))
    for hint in answers.inlay_hints(known, shown, whole):
        yield types.Range(hint.position, hint.position)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8"])
def test_broken_rule_files_get_answers_that_lie_inside_them(encoding: str, tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.configure({"models": ["smollm2-135m"]})
    analyser, chance = Analyser(project, Models()), random.Random(7)
    count = 0
    for _ in range(INPUTS):
        text = Text(mutated(chance), encoding)
        for found in ranges(Shown.of(text, str(tmp_path / "rules.yaml")), chance, analyser):
            for place in (found.start, found.end):
                assert place.line < text.line_count
                assert text.position(text.offset(place)) == place
            assert found.start <= found.end
            count += 1
    assert count > INPUTS
