"""`long_context:` and `kvc2:` in native rule files: checked, carried in the plan, compared, and completed in editors."""

from __future__ import annotations

import pickle
from pathlib import Path

import jsonschema
import pytest
from rulefiles import validated

import ktopt
from ktopt.authoring.fmt import format_text
from ktopt.diagnostics import CompileError, Severity, UsageError
from ktopt.plan import Plan
from ktopt.plan_diff import diff_plans
from ktopt.plan_json import PlanFileError, plan_from_json, plan_to_json
from ktopt.schema import plan_schema
from ktopt.source import SourceFile
from ktopt.working_memory import prompt_piece

MODEL = "smollm2-135m"
LINEARS = "  - {match: 'class=Linear', replace: KTransformersLinear}\n"
LAYERS = "  - {match: '@model.layers.*', replace: KDecoderLayer, kwargs: {KWARGS}}\n"
FAST = "long_context: {block_size: 64, second_block_count: 8}\nkvc2: {cpu_memory_size_GB: 0.5}\n"
CONFIG = "model: {name_or_path: smollm2-135m}\nlong_context: {CONFIG}\n"


def rules(sections: str, rules: str = LINEARS) -> SourceFile:
    return SourceFile("rules.yaml", f"version: 1\nplace:\n  cpu: '@**'\n{sections}rules:\n{rules}")


def planned(sections: str, **options: object) -> Plan:
    return ktopt.compile(rules(sections), MODEL, **options)


def test_a_plan_carries_what_the_sections_say_by_the_fields_names_and_nothing_else() -> None:
    plan = planned(FAST)
    assert plan.long_context == {"block_size": 64, "second_select_num": 8}
    assert plan.kvc2 == {"cpu_memory_size_GB": 0.5}
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_file_has_them_only_where_there_are_some_and_reads_back() -> None:
    plan, plain = planned(FAST), planned("")
    assert not {"long_context", "kvc2"} & plan_to_json(plain).keys()
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan_from_json(plan_to_json(plain)) == plain
    jsonschema.Draft7Validator(plan_schema()).validate(plan_to_json(plan))


@pytest.mark.parametrize(("section", "values", "said"), [
    ("long_context", {"block_sise": 64}, "there is no `block_sise`; did you mean `block_size`?"),
    ("long_context", {"block_size": "64"}, "`block_size` must be a whole number"),
    ("kvc2", {"utilization_percentage": 2}, "from 0 to 1, not 2"),
])  # fmt: skip
def test_a_plan_file_whose_settings_can_not_be_is_refused(section: str, values: dict[str, object], said: str) -> None:
    data = plan_to_json(planned(FAST))
    with pytest.raises(PlanFileError, match=section) as caught:
        plan_from_json({**data, section: values})
    assert said in str(caught.value)


def test_plans_that_differ_in_a_setting_differ() -> None:
    difference = diff_plans(planned(FAST), planned(FAST.replace("64", "128")))
    assert not difference.empty
    assert [str(setting) for setting in difference.settings] == ["long_context.block_size 64 -> 128"]
    assert diff_plans(planned(FAST), planned(FAST)).empty


def test_a_file_goes_before_what_it_imports_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("version: 1\nlong_context: {block_size: 32, token_step: 4}\nkvc2: {disk_path: d}\n")
    own = "version: 1\nimport: [base.yaml]\nlong_context: {block_size: 64}\nrules:\n" + LINEARS
    (tmp_path / "rules.yaml").write_text(own)
    plan = ktopt.compile(tmp_path / "rules.yaml", MODEL)
    assert plan.long_context == {"block_size": 64, "token_step": 4}
    assert plan.kvc2 == {"disk_path": "d"}


def test_what_other_sections_may_settle_is_no_finding_of_the_file() -> None:
    _, alone = validated("version: 1\nlong_context: {local_windows_len: 65536}\nrules: []\n")
    assert [d.code for d in alone] == []
    _, both = validated("version: 1\nlong_context: {local_windows_len: 65536, max_seq_len: 4096}\nrules: []\n")
    assert [(d.code, d.severity) for d in both] == [("KT210", Severity.ERROR)]


def test_a_length_that_is_rounded_is_said_where_it_stands() -> None:
    _, report = validated("version: 1\nlong_context:\n  max_seq_len: 139000\nrules: []\n")
    (found,) = report
    assert (found.code, found.span.start.line) == ("KT211", 3)
    assert "rounded up to 139008" in found.message


def config(tmp_path: Path, settings: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("CONFIG", settings))
    return path


def test_a_config_that_is_named_goes_before_the_rules_and_one_that_was_found_after_them(tmp_path: Path) -> None:
    from dataclasses import replace

    from ktopt.config_file import read_config

    path = config(tmp_path, "block_size: 32, token_step: 4")
    assert planned(FAST, config=path).long_context == {"block_size": 32, "second_select_num": 8, "token_step": 4}
    found = replace(read_config(path), found=True)
    assert planned(FAST, config=found).long_context == {"block_size": 64, "second_select_num": 8, "token_step": 4}


def test_a_config_that_can_not_be_is_refused_with_its_findings(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="did you mean `block_size`"):
        planned(FAST, config=config(tmp_path, "block_sise: 32"))
    with pytest.raises(UsageError, match="config is the path"):
        planned(FAST, config=3)


@pytest.mark.parametrize(("kwargs", "block", "named", "found", "option", "piece"), [
    ("{}", "", "", "", None, 512),
    ("{}", "", "", "chunk_size: 100", None, 100),
    ("{}", "chunk_size: 200", "", "chunk_size: 100", None, 200),
    ("{chunk_size: 300}", "chunk_size: 200", "", "chunk_size: 100", None, 300),
    ("{chunk_size: 300}", "chunk_size: 200", "chunk_size: 400", "", None, 400),
    ("{chunk_size: 300}", "chunk_size: 200", "chunk_size: 400", "", 500, 500),
])  # fmt: skip
def test_a_prompt_s_piece_is_of_the_first_that_names_one(
    tmp_path: Path, kwargs: str, block: str, named: str, found: str, option: int | None, piece: int
) -> None:
    from dataclasses import replace

    from ktopt.config_file import read_config

    given = None
    if named or found:
        given = replace(read_config(config(tmp_path, named or found)), found=bool(found))
    section = f"long_context: {{{block}}}\n" if block else ""
    text = rules(section, LAYERS.replace("{KWARGS}", kwargs))
    assert prompt_piece(ktopt.compile(text, MODEL, config=given, chunk_size=option)) == piece


def test_without_operators_that_have_one_the_section_s_chunk_is_the_prompt_s_piece() -> None:
    assert prompt_piece(planned("long_context: {chunk_size: 2000}\n")) == 2000
    assert prompt_piece(planned("")) is None


def test_normal_form_has_the_sections_after_the_settings() -> None:
    text = "version: 1\nrules:\n" + LINEARS + "kvc2: {disk_path: d}\nlong_context: {block_size: 64}\ndtype: float32\n"
    keys = [line.split(":")[0] for line in format_text(SourceFile("r.yaml", text)).splitlines() if line and line[0].isalpha()]
    assert keys == ["version", "dtype", "long_context", "kvc2", "rules"]
