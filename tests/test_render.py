"""Every format of findings, as text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ktopt.diagnostics import Diagnostic, Edit, Fix, Related, Severity
from ktopt.render import FORMATS, render
from ktopt.render.style import Style, printable, width
from ktopt.source import Origin, Position, SourceFile, Span

TEXT = '- match:\n    name: "^model$"\n  replace:\n    class: defualt\n'
SOURCES = {"r.yaml": SourceFile("r.yaml", TEXT)}
FOUND = Diagnostic(
    "KT401",
    Severity.ERROR,
    "unknown operator 'defualt'",
    "r.yaml",
    Span.at(4, 12, 7),
    related=(Related("asked for by this rule", Origin("r.yaml", Span.at(1, 3, 5))),),
    help="write default",
)


def test_full_shows_the_line_the_carets_the_related_place_and_the_help() -> None:
    assert render([FOUND], "full", sources=SOURCES) == (
        "r.yaml:4:12: KT401 error: unknown operator 'defualt'\n"
        "  |\n"
        "4 |     class: defualt\n"
        "  |            ^^^^^^^\n"
        " --> r.yaml:1:3: asked for by this rule\n"
        "  |\n"
        "1 | - match:\n"
        "  |   -----\n"
        "  = help: write default\n"
    )


def test_full_says_which_option_applies_a_fix() -> None:
    safe = Fix("write `default`", (Edit("r.yaml", FOUND.span, "default"),))
    assert render([replace(FOUND, fix=safe)], "full", sources=SOURCES).endswith("  = fix: write `default` (--fix)\n")
    guess = replace(safe, safe=False)
    assert render([replace(FOUND, fix=guess)], "full", sources=SOURCES).endswith("(--unsafe-fixes)\n")


def test_findings_stand_apart_by_an_empty_line() -> None:
    assert "default\n\nr.yaml" in render([FOUND, FOUND], "full", sources=SOURCES)


def test_concise_is_one_line_each() -> None:
    two_lines = Diagnostic("KT101", Severity.WARNING, "one\ntwo", "r.yaml")
    assert render([FOUND, two_lines], "concise") == (
        "r.yaml:4:12: KT401 error: unknown operator 'defualt'\nr.yaml:1:1: KT101 warning: one two\n"
    )


def test_json_is_a_list_of_records() -> None:
    (record,) = json.loads(render([FOUND], "json"))
    assert record["code"] == "KT401"
    assert record["severity"] == "error"
    assert record["span"] == {"start": {"line": 4, "column": 12}, "end": {"line": 4, "column": 19}}
    assert record["related"][0]["span"]["start"] == {"line": 1, "column": 3}
    assert record["help"] == "write default"
    assert json.loads(render([], "json")) == []


def test_jsonl_is_one_record_a_line() -> None:
    lines = render([FOUND, FOUND], "jsonl").splitlines()
    assert [json.loads(line)["code"] for line in lines] == ["KT401", "KT401"]


def test_colours_only_when_asked_for() -> None:
    for format in FORMATS:
        assert "\x1b" not in render([FOUND], format, sources=SOURCES)
    coloured = render([FOUND], "full", sources=SOURCES, style=Style(colour=True))
    assert "\x1b[1;31mKT401 error\x1b[0m" in coloured


@pytest.mark.parametrize("span", [Span.at(99, 1), Span.at(4, 400, 9), Span(Position(2, 5), Position(4, 3))])
def test_a_span_past_the_text_or_over_several_lines_still_renders(span: Span) -> None:
    text = render([Diagnostic("KT101", Severity.ERROR, "m", "r.yaml", span)], "full", sources=SOURCES)
    assert text.startswith(f"r.yaml:{span.start.line}:")


def test_a_span_over_several_lines_is_marked_to_its_first_lines_end() -> None:
    text = render(
        [Diagnostic("KT101", Severity.ERROR, "m", "r.yaml", Span(Position(2, 5), Position(4, 3)))], "full", sources=SOURCES
    )
    assert text.endswith('2 |     name: "^model$"\n  |     ^^^^^^^^^^^^^^^\n')


def test_a_long_line_is_cut_around_what_is_meant() -> None:
    line = "x" * 5000 + "HERE" + "y" * 5000
    text = render(
        [Diagnostic("KT101", Severity.ERROR, "m", "r", Span.at(1, 5001, 4))], "full", sources={"r": SourceFile("r", line)}
    ).splitlines()
    assert len(text[2]) < 200
    assert text[2][text[3].index("^") :].startswith("HERE")


def test_control_characters_of_a_file_don_t_reach_the_terminal() -> None:
    hostile = "a\x1b[31m\tb"
    text = render(
        [Diagnostic("KT101", Severity.ERROR, hostile, "r", Span.at(1, 7, 1))], "full", sources={"r": SourceFile("r", hostile)}
    )
    assert "\x1b" not in text
    assert "\t" not in text
    assert printable("plain") == "plain"


def test_carets_stand_under_what_follows_wide_characters() -> None:
    line = "name: 日本 = x"
    text = render(
        [Diagnostic("KT101", Severity.ERROR, "m", "r", Span.at(1, line.index("x") + 1))],
        "full",
        sources={"r": SourceFile("r", line)},
    ).splitlines()
    assert width(text[3][: text[3].index("^")]) == width(text[2][: text[2].index("x")])
    assert width("日本") == 4
