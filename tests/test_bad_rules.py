"""Each wrong file of the shared cases whose fault shows without a model gets the error that its header asks for, at that line."""

from __future__ import annotations

import re

import pytest
from rulefiles import CASES, needs_cases

from ktopt.diagnostics import Diagnostic, Report, Severity
from ktopt.parse import parse, read_source
from ktopt.validate import validate

WITHOUT_MODEL = {
    "01": ("KT304", ["rule 1 match.name", "invalid regex at column 19", '"4-1"', "for layers 4 to 10 write ([4-9]|10)"]),
    "02": ("KT308", ["rule 1", "literal backslash", r"in single quotes write \. once, or use double quotes"]),
    "03": ("KT101", [r'unknown escape "\." in a double-quoted scalar; write "\\." or use single quotes']),
    "08": ("KT404", ["rule 1 kwargs.transfer_map", 'key "30" is a string', "remove the quotes"]),
    "10": ("KT402", ["rule 1 kwargs.generate_op", "MLPCPUExperts", "KExpertsTorch", "KExpertsMarlin", "did you mean KExpertsCPU?"]),
    "11": ("KT403", ["rule 1 kwargs", "KDeepseekV2Attention takes no `generate_devise`", "did you mean `generate_device`?"]),
    "12": ("KT204", ["rule 1", "`recursive` belongs beside match and replace, not inside replace", "rule 2"]),
    "13": ("KT110", ["rule 1: recursive", 'expected true/false, got the string "False" - remove the quotes']),
    "14": ("KT406", ["rule 1 kwargs.generate_device", "KLinearMarlin runs on cuda only, got cpu", "KLinearCPUInfer"]),
    "17": ("KT404", ["rule 1 kwargs.prefill_op", "KTransformersExperts", "KExpertsTorch"]),
    "18": ("KT403", ["rule 1 kwargs", "KDeepseekV2Model takes no `prefill_device`", "device", "transfer_map"]),
    "20": ("KT409", ["rule 1 kwargs", "default needs `generate_device`"]),
    "21": ("KT401", ["rule 1 replace.class", "ktransformers.operators.gate has no KMoEGateDeepSeekV3", "KMoEGate?"]),
    "22": ("KT102", ["duplicate key `kwargs` (first at line 7)"]),
}
WITH_MODEL = {"04", "05", "07", "15"}
"""Their faults show in a model's tree only: a shadowed rule, layers left out, a layer on two devices, a quantised kv_b_proj."""


def findings(number: str) -> tuple[list[Diagnostic], int]:
    """The findings on a case without a model that are more than an info, and the line that its header names."""
    path = next(CASES.glob(f"bad_rules/{number}-*.yaml"))
    source = read_source(path)
    header = re.search(r"# VALIDATOR: \S+:(\d+): error", source.text)
    assert header, path
    report = Report()
    validate(parse(source, report), report)
    return [d for d in report.sorted() if d.severity is not Severity.INFO], int(header[1])


@needs_cases
def test_every_case_is_accounted_for() -> None:
    assert {p.name[:2] for p in CASES.glob("bad_rules/*.yaml")} == WITHOUT_MODEL.keys() | WITH_MODEL


@needs_cases
@pytest.mark.parametrize("number", WITHOUT_MODEL)
def test_the_error_of_the_header_stands_at_its_line(number: str) -> None:
    code, said = WITHOUT_MODEL[number]
    found, line = findings(number)
    errors = [d for d in found if d.span.start.line == line and d.severity is Severity.ERROR]
    assert [d.code for d in errors] == [code]
    for text in said:
        assert text in errors[0].message


@needs_cases
@pytest.mark.parametrize("number", sorted(WITHOUT_MODEL.keys() - {"11"}))
def test_and_nothing_else_is_found(number: str) -> None:
    assert len(findings(number)[0]) == 1


@needs_cases
def test_the_other_misspelt_kwarg_is_found_too_and_chunk_size_is_accepted() -> None:
    found = [d for d in findings("11")[0] if d.severity is Severity.ERROR]
    assert [(d.code, d.span.start.line) for d in found] == [("KT403", 8), ("KT403", 11)]
    assert "did you mean `absorb_for_prefill`?" in found[1].message


@needs_cases
@pytest.mark.parametrize("number", sorted(WITH_MODEL))
def test_what_only_a_tree_can_show_is_not_claimed_without_one(number: str) -> None:
    assert findings(number)[0] == []
