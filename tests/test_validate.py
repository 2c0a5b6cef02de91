"""Validation: both rule forms to a RuleSet, and a finding with place and remedy for everything that upstream swallowed."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rulefiles import CASES, lines, needs_cases, only, validated

from ktopt.diagnostics import Report, Severity
from ktopt.parse import parse, read_source
from ktopt.ruleset import NameClass, RuleSet
from ktopt.validate import validate
from ktopt.validate.replacement import near_device

BROKEN_UPSTREAM = {"Internlm2_5-7b-Chat-1m.yaml": [("KT403", 18)]}
"""KLlamaModel's constructor fails on prefill_device in upstream, too."""


def rule(replace: str, match: str = "{name: '^lm_head$'}", rest: str = "") -> str:
    return f"- match: {match}\n  replace: {replace}\n{rest}"


def kwargs(operator: str, options: str) -> str:
    return rule("{class: " + operator + ", kwargs: {" + options + "}}")


@needs_cases
@pytest.mark.parametrize(
    "name", [str(p.relative_to(CASES / "upstream_rules")) for p in sorted(CASES.glob("upstream_rules/**/*.yaml"))]
)
def test_the_files_that_upstream_shipped_are_right(name: str) -> None:
    report = Report()
    ruleset = validate(parse(read_source(CASES / "upstream_rules" / name), report), report)
    assert [(d.code, d.span.start.line) for d in report.errors] == BROKEN_UPSTREAM.get(name, [])
    assert (ruleset is None) == (name in BROKEN_UPSTREAM)


def test_a_list_rule_becomes_a_rule_with_origins() -> None:
    ruleset, report = validated("""\
        - match:
            name: "^model\\\\.layers\\\\..*\\\\.mlp\\\\.experts$"
            class: torch.nn.Module
          replace:
            class: ktransformers.operators.experts.KTransformersExperts
            kwargs:
              generate_device: cpu
              prefill_device: cpu
              generate_op: KExpertsCPU
          recursive: False
        - match: {class: torch.nn.Linear}
          replace: {}
        """)
    assert not report.items
    assert ruleset is not None
    first, second = ruleset.rules
    assert isinstance(first.match, NameClass)
    assert (first.match.name, first.match.cls) == (r"^model\.layers\..*\.mlp\.experts$", "torch.nn.Module")
    assert (first.index, first.number, first.id, first.recursive) == (0, 1, "rule-1", False)
    assert first.replace.operator.name == "KTransformersExperts"
    assert first.replace.written == "ktransformers.operators.experts.KTransformersExperts"
    assert first.replace.given == {"generate_device": "cpu", "prefill_device": "cpu", "generate_op": "KExpertsCPU"}
    assert first.replace.config.to_kwargs()["prefill_op"] == "KExpertsTorch"
    assert {k: v.span.start.line for k, v in first.replace.kwarg_origins.items()} == {
        "generate_device": 7,
        "prefill_device": 8,
        "generate_op": 9,
    }
    assert (str(first.origin), str(first.match_origin), str(first.replace.origin)) == (
        "rules.yaml:1",
        "rules.yaml:2",
        "rules.yaml:5",
    )
    assert (second.replace.operator.name, second.replace.given, second.recursive) == ("default", {}, True)
    assert (ruleset.form, ruleset.default_device, ruleset.path) == ("list", "cuda:0", "rules.yaml")


def test_upstream_misspellings_of_kwargs_are_other_names_of_the_right_ones() -> None:
    ruleset, report = validated(
        kwargs("KDeepseekV2Attention", "chunck_size: 256") + kwargs("KDeepseekV2Model", "per_layer_prefill_intput_threshold: 0")
    )
    assert not report.errors
    assert ruleset is not None
    assert [r.replace.given for r in ruleset.rules] == [{"chunk_size": 256}, {"per_layer_prefill_input_threshold": 0}]


@pytest.mark.parametrize(("text", "code", "line", "said"), [
    ("", "KT201", 1, "holds no rules"),
    ("# only this\n", "KT201", 1, "holds no rules"),
    ("[]", "KT201", 1, "holds no rules"),
    ("just text", "KT201", 1, 'a list of rules or a mapping with `rules:`, not the string "just text"'),
    ("- just text", "KT206", 1, "rule 1: a rule must be a mapping"),
    ("match: {name: a}\nreplace: {class: default}\n", "KT202", 1, "begin each rule with `- `"),
    ("- replace: {class: default}\n", "KT203", 1, "rule 1: `match` is missing"),
    ("- match: {name: a}\n", "KT203", 1, "rule 1: `replace` is missing"),
    (rule("{class: default}", match="{}"), "KT203", 1, "rule 1: `match` needs `name`, `class`, or both"),
    (rule("{class: default}", match=""), "KT205", 1, "rule 1: `match:` is empty"),
    (rule(""), "KT205", 2, "rule 1: `replace:` is empty"),
    (rule("{class: default, kwargs: }"), "KT205", 2, "rule 1: `kwargs:` is empty"),
    (rule("default"), "KT206", 2, 'rule 1: `replace` must be a mapping, not the string "default"'),
    (rule("{class: default}", match="'@lm_head'"), "KT206", 1, "rule 1: `match` must be a mapping"),
    (rule("{class: default}", match="{name: [0-9]}"), "KT206", 1, "rule 1 match: `name` must be a string, not a list"),
    (rule("{class: default}", match="{name: 12}"), "KT206", 1, "rule 1 match: `name` must be a string, not 12"),
    (rule("{class: default}", match="{class: 'torch.nn.Linear()'}"), "KT207", 1, "is not the name of a class"),
    (rule("{class: default}", match="{nmae: a, class: b}"), "KT202", 1, "rule 1 match: unknown key `nmae`; did you mean `name`?"),
    (rule("{class: default, device: cpu}"), "KT202", 2, "rule 1 replace: `device` doesn't belong here: it is an option"),
    (rule("{class: default, match: x}"), "KT202", 2, "`match` doesn't belong here: it stands beside"),
    (rule("{klass: default}"), "KT202", 2, "unknown key `klass`; did you mean `class`?"),
    (rule("{class: default}", rest="  recursiv: false\n"), "KT202", 3, "unknown key `recursiv`; did you mean `recursive`?"),
    (rule("{class: default}", rest="  kwargs: {}\n"), "KT202", 3, "`kwargs` goes inside `replace`"),
    (rule("{class: default}", rest="  expect: 3\n"), "KT202", 3, "it is of the native form"),
    (rule("{class: default}", rest="  recursive:\n"), "KT205", 3, "`recursive` is empty"),
    (rule("{class: default}", rest="  recursive: 'no'\n"), "KT110", 3, 'got the string "no" - remove the quotes'),
    (rule("{class: default}", rest="  recursive: never\n"), "KT206", 3, "`recursive` must be true or false"),
    (rule("{class: default, recursive: false}"), "KT204", 2, "`recursive` belongs beside match and replace"),
    (rule("{class: Default}"), "KT401", 2, "did you mean default?"),
    (rule("{class: KLinearMarlin}"), "KT401", 2, "KLinearMarlin is an op of KTransformersLinear, not an operator"),
    (rule("{class: torch.nn.Linear}"), "KT401", 2, 'there is no operator "torch.nn.Linear"'),
    (kwargs("default", "generate_device: gpu"), "KT501", 2, '"gpu" is not a device; did you mean cuda:0?'),
    (kwargs("default", "generate_device: 'cuda:x'"), "KT501", 2, '"cuda:x" is not a device'),
    (kwargs("default", "generate_device: [cpu]"), "KT404", 2, "`generate_device` must be a string or null"),
    (kwargs("KDeepseekV2Model", "transfer_map: {30: gpu:1}"), "KT501", 2, 'transfer_map.30: "gpu:1" is not a device'),
    (kwargs("KDeepseekV2Attention", "absorb_for_prefill: 'False'"), "KT404", 2, "must be true or false or 'auto', not 'False'"),
    (kwargs("KDeepseekV2Attention", "chunk_size: 1, chunck_size: 2"), "KT405", 2, "another spelling"),
    (kwargs("KTransformersLinear", "generate_op: QuantizedLinearMarlin"), "KT402", 2, "(did you mean"),
    (kwargs("KTransformersExperts", "generate_device: cuda, generate_op: KExpertsCPU"), "KT406", 2, "on cpu only, got cuda:0"),
    (kwargs("KTransformersLinear", "prefill_device: cpu, prefill_op: KLinearFP8"), "KT406", 2, "on cuda only, got cpu"),
    (kwargs("KTransformersExperts", "backend: avx"), "KT404", 2, "'llamafile'"),
    (rule("{class: default}", match="{name: 'a('}"), "KT304", 1, "rule 1 match.name: invalid regex"),
])  # fmt: skip
def test_what_is_wrong_has_a_code_a_place_and_words(text: str, code: str, line: int, said: str) -> None:
    _, report = validated(text)
    found = report.errors
    assert [(d.code, d.span.start.line) for d in found][:1] == [(code, line)], [str(d) for d in report]
    assert said in found[0].message + str(found[0].help)
    assert len(found) == 1 or code == "KT202"


@pytest.mark.parametrize(("text", "code", "said"), [
    (kwargs("KDeepseekV2Model", "per_layer_prefill_intput_threshold: 30000"), "KT408", "has no effect"),
    (kwargs("flashinfer_attn", "absorb_for_prefill: false"), "KT408", "has no effect"),
    (kwargs("KQwen3MoeAttention", "chunck_size: 256"), "KT408", "takes a prompt whole"),
    (kwargs("KMoEGateQwen2Moe", "use_quant: true"), "KT408", "`use_quant: true` has no effect: the router's own"),
    (kwargs("KTransformersLinear", "generate_op: KLinearTorch, num_bits: 8"), "KT408", "only KLinearMarlin and VLinearMarlin"),
    (kwargs("KTransformersLinear", "generate_op: KLinearTorch, precision: nf4"), "KT408", "only KLinearIPEXLLM reads it"),
    (kwargs("KTransformersLinear", "generate_op: KLinearCPUInfer, stride: 8"), "KT408", "divide the work"),
    (kwargs("KTransformersExperts", "generate_op: KExpertsTorch, backend: AMXInt8"), "KT408", "generate_op is KExpertsTorch"),
    (rule("{class: KTransformersLinearW8A8A2}"), "KT410", "without the Ascend kernels"),
    (rule("{class: default}", rest="  recursive: 0\n"), "KT206", "read as false"),
    (rule("{class: default}", match="{name: 'layers.[10-19].'}"), "KT304", "(0, 1, 9), not the numbers 10 to 19"),
])  # fmt: skip
def test_what_is_doubtful_is_a_warning_and_the_rules_stand(text: str, code: str, said: str) -> None:
    ruleset, report = validated(text)
    finding = only(report)
    assert (finding.code, finding.severity) == (code, Severity.WARNING)
    assert said in finding.message
    assert ruleset is not None


@pytest.mark.parametrize(("options", "key", "said"), [
    ("generate_device: cpu, prefill_device: cuda", "prefill_device", "prefill runs by the generate op on the generate device"),
    ("generate_op: KLinearCPUInfer, prefill_op: KLinearTorch", "prefill_op", "in this version, KLinearCPUInfer"),
    ("generate_op: KLinearIPEXLLM, precision: fp8", "precision", "KLinearIPEXLLM would read it, and IPEX-LLM's kernels are not"),
])  # fmt: skip
def test_what_this_version_does_not_do_yet_is_an_info_at_its_key(options: str, key: str, said: str) -> None:
    text = kwargs("KTransformersLinear", options)
    ruleset, report = validated(text)
    finding = only(report)
    assert (finding.code, finding.severity) == ("KT408", Severity.INFO)
    assert said in finding.message
    assert text.splitlines()[1][finding.span.start.column - 1 :].startswith(key)
    assert ruleset is not None


@pytest.mark.parametrize("options", [
    "generate_device: cuda, prefill_device: cuda:0", "generate_op: KLinearTorch, prefill_op: KLinearTorch", "prefill_device: cpu",
])  # fmt: skip
def test_a_prefill_that_is_as_the_rest_or_that_only_a_plan_can_compare_is_not_mentioned(options: str) -> None:
    assert not validated(kwargs("KTransformersLinear", options))[1].items


def test_no_op_for_prefill_is_what_happens_anyway() -> None:
    assert not validated(kwargs("KTransformersExpertsV2", 'generate_op: KExpertsTorch, prefill_op: "None"'))[1].items


@pytest.mark.parametrize(("operator", "options", "said"), [
    ("KTransformersLinear", "generate_op: KLinearMarlin, group_size: 0", "at least 1, not 0"),
    ("KTransformersLinear", "generate_op: KLinearFP8, block_size: -128", "at least 1, not -128"),
    ("KTransformersLinear", "stride: 0", "at least 1, not 0"),
    ("KDeepseekV2Attention", "chunk_size: 0", "at least 1, not 0"),
    ("KDeepseekV2Model", "per_layer_prefill_input_threshold: -1", "at least 0, not -1"),
])  # fmt: skip
def test_a_number_that_can_be_no_size_is_an_error(operator: str, options: str, said: str) -> None:
    finding = only(validated(kwargs(operator, options))[1])
    assert (finding.code, finding.severity) == ("KT405", Severity.ERROR)
    assert said in finding.message


@pytest.mark.parametrize(("options", "said"), [("num_bits: 3", "one of 4, 8"), ("precision: int4", "'sym_int4'")])
def test_a_choice_of_values_is_checked(options: str, said: str) -> None:
    finding = only(validated(kwargs("KTransformersLinear", options))[1])
    assert (finding.code, finding.severity) == ("KT404", Severity.ERROR)
    assert said in finding.message


def test_an_unknown_device_is_read_as_the_nearest_one_so_that_checking_goes_on() -> None:
    ruleset, report = validated(kwargs("default", "generate_device: gpu"))
    assert lines(report) == [("KT501", 2)]
    assert ruleset is not None
    assert ruleset.rules[0].replace.given == {"generate_device": "cuda:0"}


@pytest.mark.parametrize(("text", "device"), [
    ("gpu", "cuda:0"), ("GPU:2", "cuda:2"), ("cuda1", "cuda:1"), ("CPU", "cpu"), ("cpu:1", "cpu"), ("cdua:3", "cuda:3"),
    ("disk", ""), ("", ""),
])  # fmt: skip
def test_a_misspelt_device_has_a_nearest_one(text: str, device: str) -> None:
    assert near_device(text) == device


def mended(text: str) -> str:
    """The text with the one finding's fix applied, last edit first."""
    fix = only(validated(text)[1]).fix
    assert fix is not None
    rows = text.splitlines(keepends=True)
    starts = [sum(map(len, rows[:i])) for i in range(len(rows) + 1)]
    for edit in sorted(fix.edits, key=lambda e: e.span, reverse=True):
        start, end = (starts[p.line - 1] + p.column - 1 for p in (edit.span.start, edit.span.end))
        text = text[:start] + edit.text + text[end:]
    return text


@pytest.mark.parametrize("text", [
    rule("{class: default}", rest='  recursive: "False"\n'),
    "- match:\n    name: a\n  replace:\n    class: default\n    recursive: False\n    kwargs: {generate_device: cpu}\n",
    kwargs("default", "generate_devise: cpu"),
    kwargs("default", "generate_device: gpu"),
    kwargs("KDeepseekV2Model", 'transfer_map: {"30": cuda:1}'),
    kwargs("KDeepseekV2Attention", "absorb_for_prefill: 'False'"),
    kwargs("KTransformersExperts", "generate_op: MLPCPUExperts"),
    rule("{class: ktransformers.operators.gate.KMoEGateDeepSeekV3}"),
    rule("{class: default}", match="{name: '^model\\\\.layers$'}"),
    rule("{class: default}", match='{name: "layers.([4-10])."}'),
    rule("{class: default}", match="{nmae: lm_head}"),
    rule("{class: default}").replace("match", "mach"),
    rule("{class: default}").replace("replace", "replce"),
    kwargs("KTransformersLinear", "device: cpu"),
    "- match: {name: a}\n  replace:\n    class: default\n    kwargs:\n    generate_device: cpu\n    prefill_device: cpu\n",
    "version: 1\nrules:\n- match: class=Linear\n  replace: default\n  kwargs:\n  generate_device: cpu\n  recursive: false\n",
    "version: 1\nrules:\n- {match: class=Linear, replace: default, kwargs: {generate_device: cpu}, expect: '210'}\n",
])  # fmt: skip
def test_a_fix_leaves_a_right_file(text: str) -> None:
    ruleset, report = validated(mended(text))
    assert not report.items
    assert ruleset is not None


def test_options_that_were_not_indented_become_kwargs() -> None:
    text = "- match: {name: a}\n  replace:\n    class: default\n    kwargs:\n    generate_device: cuda:1\n"
    ruleset, _ = validated(mended(text))
    assert ruleset is not None
    assert ruleset.rules[0].replace.given == {"generate_device": "cuda:1"}


def test_a_selector_in_a_list_file_is_told_where_selectors_belong() -> None:
    _, report = validated(rule("{class: default}", match="'@lm_head'"))
    assert "selectors belong to the native form" in str(only(report).help)


def test_a_moved_recursive_takes_effect() -> None:
    text = "- match:\n    name: a\n  replace:\n    class: default\n    recursive: False\n    kwargs: {generate_device: cpu}\n"
    ruleset, _ = validated(mended(text))
    assert ruleset is not None
    assert ruleset.rules[0].recursive is False


@needs_cases
def test_the_fix_of_the_shared_regex_case_is_the_one_that_its_header_names() -> None:
    text = next(CASES.glob("bad_rules/01-*.yaml")).read_text(encoding="utf-8")
    assert r"'^model\.layers\.([4-9]|10)\.mlp\.experts$'" in mended(text)


def test_findings_of_all_rules_come_at_once() -> None:
    _, report = validated(rule("{class: nothing_like_it}") + rule("{class: default}", match="{}") + kwargs("default", "x: 1"))
    assert [code for code, _ in lines(report)] == ["KT401", "KT203", "KT403"]


def test_thousands_of_wrong_rules_are_answered_fast() -> None:
    import time

    start = time.process_time()
    _, report = validated("- {}\n" * 1900)
    assert len(report) == 3800
    _, report = validated("- {}\n" * 2500)
    assert lines(report) == [("KT104", 2500)]
    assert time.process_time() - start < 1


def native(text: str) -> tuple[RuleSet | None, Report]:
    return validated("version: 1\n" + dedent(text))


NATIVE_RULE = "rules:\n  - {id: a, match: {name: x}, replace: default}\n"


def test_a_native_rule_set_has_its_settings() -> None:
    ruleset, report = native("""\
        architectures: [DeepseekV3ForCausalLM]
        dtype: bfloat16
        default_device: cuda
        rules:
          - id: experts
            match: {class: Mlp}
            replace: KTransformersExperts
            kwargs: {generate_device: cpu}
            expect: 58
            recursive: false
          - match: {name: x}
            replace: {class: default, kwargs: {generate_device: cuda}}
        """)
    assert not report.items
    assert ruleset is not None
    first, second = ruleset.rules
    assert (first.id, first.expect, first.recursive, first.replace.given) == ("experts", 58, False, {"generate_device": "cpu"})
    assert (second.id, second.replace.given) == ("rule-2", {"generate_device": "cuda:0"})
    assert (ruleset.form, ruleset.dtype, ruleset.default_device) == ("native", "bfloat16", "cuda:0")
    assert ruleset.architectures == ("DeepseekV3ForCausalLM",)
    assert str(ruleset.architectures_origin) == "rules.yaml:2"


def test_a_native_file_goes_to_the_cpu_by_default() -> None:
    ruleset, _ = native(NATIVE_RULE)
    assert ruleset is not None
    assert (ruleset.default_device, ruleset.dtype) == ("cpu", None)


@pytest.mark.parametrize(("text", "code", "line", "said"), [
    ("rule: []\n", "KT202", 2, "unknown key `rule`; did you mean `rules`?"),
    ("dtype: float32\n", "KT203", 1, "`rules` is missing"),
    ("rules:\n", "KT205", 2, "`rules:` is empty"),
    ("rules: {a: b}\n", "KT206", 2, "`rules` must be a list, not a mapping"),
    ("dtype: fp32\n" + NATIVE_RULE, "KT207", 2, 'dtype "fp32" isn\'t known'),
    ("default_device: gpu\n" + NATIVE_RULE, "KT501", 2, "did you mean cuda:0?"),
    ("long_context: {block_sise: 128}\n" + NATIVE_RULE, "KT202", 2, "did you mean `block_size`?"),
    ("long_context: {anchor_type: QUEST, anchor_num: 3}\n" + NATIVE_RULE, "KT210", 2, "needs `anchor_num: 2`, not 3"),
    ("long_context: 128\n" + NATIVE_RULE, "KT206", 2, "`long_context` must be a mapping"),
    ("kvc2: {block_size: 128}\n" + NATIVE_RULE, "KT202", 2, "it belongs under `long_context:`"),
    ("kvc2: {cpu_memory_size_GB: -1}\n" + NATIVE_RULE, "KT210", 2, "at least 0, not -1"),
    ("architectures: {a: b}\n" + NATIVE_RULE, "KT206", 2, "must be a list of strings"),
    ("let: [a]\n" + NATIVE_RULE, "KT206", 2, "`let` must be a mapping"),
    ("place: x\n" + NATIVE_RULE, "KT206", 2, "`place` must be a mapping"),
    ("import: common.yaml\n" + NATIVE_RULE, "KT109", 2, "`import` is a list of files"),
    (NATIVE_RULE + "  - {id: a, match: {name: y}, replace: default}\n", "KT207", 4, 'id "a" is given twice'),
    ("rules:\n  - {match: {name: y}, replace: default, expect: -1}\n", "KT206", 3, "a whole number from 0, not -1"),
    ("rules:\n  - {match: {name: y}, replace: default, expect: true}\n", "KT206", 3, "`expect` must be a whole number"),
    ("rules:\n  - {match: {name: y}, replace: default, kwarg: {}}\n", "KT202", 3, "unknown key `kwarg`; did you mean `kwargs`?"),
    ("rules:\n  - {id: q, match: {name: y}, replace: defualt}\n", "KT401", 3, "rule 1 (q) replace: there is no operator"),
    ("rules:\n  - {match: {name: y}, replace: {class: default, kwargs: {}}, kwargs: {}}\n", "KT206", 3, "keep one"),
])  # fmt: skip
def test_what_is_wrong_in_a_native_file_has_a_code_a_place_and_words(text: str, code: str, line: int, said: str) -> None:
    _, report = native(text)
    assert [(d.code, d.span.start.line) for d in report.errors] == [(code, line)], [str(d) for d in report]
    assert said in report.errors[0].message


@pytest.mark.parametrize(
    ("version", "severity"), [("", Severity.WARNING), ("version: 2", Severity.ERROR), ("version: true", Severity.ERROR)]
)
def test_another_version_is_an_error_and_none_a_warning(version: str, severity: Severity) -> None:
    finding = only(validated(f"{version}\n{NATIVE_RULE}")[1])
    assert finding.severity is severity
    assert "version" in finding.message


def compiled(folder: Path, **texts: str) -> tuple[RuleSet | None, Report]:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text("version: 1\n" + dedent(text), encoding="utf-8")
    report = Report()
    return validate(parse(read_source(folder / "top.yaml"), report), report), report


def named(*ids: str) -> str:
    return "rules:\n" + "".join(f"  - {{id: {i}, match: {{name: {i}}}, replace: default}}\n" for i in ids)


def test_a_file_overrides_what_it_imports(tmp_path: Path) -> None:
    ruleset, report = compiled(
        tmp_path,
        top="import: [one.yaml, two.yaml]\ndtype: float32\n" + named("own"),
        one="import: [deep.yaml]\ndtype: float16\ndefault_device: cuda\n" + named("one"),
        two="import: [deep.yaml]\narchitectures: [X]\ndefault_device: cpu\n" + named("two"),
        deep=named("deep"),
    )
    assert not report.items
    assert ruleset is not None
    assert [(r.id, r.index) for r in ruleset.rules] == [("own", 0), ("one", 1), ("deep", 2), ("two", 3)]
    assert (ruleset.dtype, ruleset.architectures, ruleset.default_device) == ("float32", ("X",), "cuda:0")
    assert ruleset.rules[2].origin.file == str(tmp_path / "deep.yaml")


def test_an_error_in_an_imported_file_stands_there(tmp_path: Path) -> None:
    ruleset, report = compiled(tmp_path, top="import: [one.yaml]\n" + named("own"), one="rules:\n  - {match: {name: a}}\n")
    finding = only(report)
    assert (finding.file, finding.span.start.line, finding.code) == (str(tmp_path / "one.yaml"), 3, "KT203")
    assert ruleset is None


def test_the_digest_covers_imports_and_not_where_files_lie_or_how_lines_end(tmp_path: Path) -> None:
    def digest(folder: str, imported: str, newline: str = "\n") -> str:
        home = tmp_path / folder
        home.mkdir()
        ruleset, _ = compiled(home, top=("import: [one.yaml]\n" + named("own")).replace("\n", newline), one=named(imported))
        assert ruleset is not None
        return ruleset.digest

    assert digest("a", "x") == digest("b", "x") == digest("c", "x", "\r\n")
    assert digest("d", "y") != digest("e", "x")


def test_selectors_are_read_with_the_lets_of_the_file_and_of_its_imports(tmp_path: Path) -> None:
    pytest.importorskip("ktopt.selector")
    ruleset, report = compiled(
        tmp_path,
        top="import: [one.yaml]\nlet: {mine: $theirs & class=Linear}\n"
        + 'place: {"cuda:0": "@model.norm"}\nrules:\n  - {match: $mine, replace: default, when: "hw.cuda_sm >= 80"}\n',
        one='let: {theirs: "@model.layers.*.**"}\nplace: {cpu: "@lm_head"}\n',
    )
    assert not report.items, [str(d) for d in report]
    assert ruleset is not None
    assert not isinstance(ruleset.rules[0].match, NameClass)
    assert ruleset.rules[0].when is not None
    assert [p.device for p in ruleset.places] == ["cuda:0", "cpu"]


@pytest.mark.parametrize(
    "text", ["match: '$nothing'", "match: 'class=='", "match: 'layer in 0-29'", "when: 'hw.cuda_sm >='\n    match: {name: a}"]
)
def test_a_selector_that_can_not_be_read_leaves_no_rule_set(text: str) -> None:
    pytest.importorskip("ktopt.selector")
    ruleset, report = native(f"rules:\n  - replace: default\n    {text}\n")
    assert ruleset is None
    assert all(d.span.start.line == 4 for d in report.errors)
    assert report.stops_plan


VALUES = st.sampled_from([
    None, True, 0, 1.5, "", "x", "cuda:1", "gpu", "default", "KTransformersLinear", "KDeepseekV2Model", r"^model\.", "a(", [], {},
    {"30": "cuda"},
])  # fmt: skip
KEYS = st.sampled_from(
    ["match", "replace", "recursive", "name", "class", "kwargs", "generate_device", "generate_op", "transfer_map", "id", 3, None]
)
TREES = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.fixed_dictionaries({"match": TREES, "replace": TREES}) | TREES, max_size=3))
def test_whatever_stands_in_a_list_file_validation_answers_with_findings(rules: list[object]) -> None:
    ruleset, report = validated(yaml.safe_dump(rules))
    assert ruleset is not None or report.errors


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(
    st.sampled_from(["version", "architectures", "import", "rules", "dtype", "default_device", "let", "place"]),
    TREES.filter(lambda value: not isinstance(value, dict)), max_size=5,
))  # fmt: skip
def test_whatever_stands_in_a_native_file_validation_answers_with_findings(top: dict[str, object]) -> None:
    pytest.importorskip("ktopt.selector")
    ruleset, report = validated(yaml.safe_dump(top))
    assert ruleset is not None or report.errors
