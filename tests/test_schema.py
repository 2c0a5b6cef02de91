"""The JSON Schemas agree with the validator, and a wrong file gets errors that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from rulefiles import CASES, needs_cases, validated

from ktopt import registry
from ktopt.plan import ModelRef, Plan, RuleRef, Step, Transfer
from ktopt.plan_json import plan_to_json
from ktopt.schema import operator_schema, plan_schema, ruleset_schema

RULES = Path(__file__).resolve().parents[1] / "rules"


@pytest.fixture(scope="module")
def rules() -> jsonschema.Draft7Validator:
    schema = ruleset_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def as_json(text: str) -> Any:
    """A YAML text as an editor's plug-in sees it: keys are strings."""
    return json.loads(json.dumps(yaml.safe_load(text)))


def errors(schema: jsonschema.Draft7Validator, text: str) -> list[tuple[str, str]]:
    return [(error.json_path, error.message) for error in schema.iter_errors(as_json(text))]


@needs_cases
def test_the_files_that_upstream_shipped_are_right(rules: jsonschema.Draft7Validator) -> None:
    wrong = {
        str(p.relative_to(CASES)): errors(rules, p.read_text(encoding="utf-8"))
        for p in sorted(CASES.glob("upstream_rules/**/*.yaml"))
    }
    assert len(wrong) == 26
    assert {name: [path for path, _ in found] for name, found in wrong.items() if found} == {
        "upstream_rules/Internlm2_5-7b-Chat-1m.yaml": ["$[2].replace.kwargs"]
    }


def test_the_rule_sets_that_ship_are_right(rules: jsonschema.Draft7Validator) -> None:
    for path in RULES.rglob("*.yaml"):
        assert errors(rules, path.read_text(encoding="utf-8")) == [], path


KWARGS = "- match: {name: a}\n  replace: {class: %s, kwargs: {%s}}\n"


@pytest.mark.parametrize(("text", "path", "said"), [
    (KWARGS % ("KTransformersLinear", "generate_op: KX"), "$[0].replace.kwargs.generate_op", "'KX' is not one of ['KLinearTorch'"),
    (KWARGS % ("KTransformersLinear", "group_size: 0"), "$[0].replace.kwargs.group_size", "0 is less than the minimum of 1"),
    (KWARGS % ("KTransformersLinear", "num_bits: 3"), "$[0].replace.kwargs.num_bits", "3 is not one of [4, 8]"),
    (KWARGS % ("KTransformersLinear", "generate_device: gpu"), "$[0].replace.kwargs.generate_device", "'gpu' does not match"),
    (KWARGS % ("KTransformersExperts", "backend: avx"), "$[0].replace.kwargs.backend", "'avx' is not one of ['llamafile', "),
    (KWARGS % ("KDeepseekV2Model", "transfer_map: {x: cpu}"), "$[0].replace.kwargs.transfer_map", "'x' does not match"),
    (KWARGS % ("KDeepseekV2Model", "transfer_map: {1: gpu}"), "$[0].replace.kwargs.transfer_map['1']", "'gpu' does not match"),
    (KWARGS % ("KNothing", ""), "$[0].replace.class", "'KNothing' is not one of"),
    ("- match: {name: a}\n  replace: {class: default, recursive: false}\n", "$[0].replace", "'recursive' was unexpected"),
    ("- match: {}\n  replace: {class: default}\n", "$[0].match", "{} should be non-empty"),
    ("- match: {name: a}\n", "$[0]", "'replace' is a required property"),
    ("version: 2\n", "$.version", "1 was expected"),
    ("rules: [{match: x, replace: KTransformersLinear, kwargs: {stride: a}}]\n", "$.rules[0].kwargs.stride", "of type 'integer'"),
    ("rules: [{match: x, replace: {class: default}, expect: -1}]\n", "$.rules[0].expect", "-1 is less than the minimum of 0"),
    ("place: {gpu: x}\n", "$.place", "'gpu' does not match"),
    ("dtype: fp32\n", "$.dtype", "'fp32' is not one of"),
])  # fmt: skip
def test_a_wrong_file_gets_one_error_that_names_what_is_wrong(
    rules: jsonschema.Draft7Validator, text: str, path: str, said: str
) -> None:
    found = errors(rules, text)
    assert [place for place, _ in found] == [path]
    assert said in found[0][1]


@pytest.mark.parametrize("spec", registry.specs(), ids=lambda spec: spec.name)
def test_an_operator_schema_takes_the_defaults_that_its_config_has(spec: Any) -> None:
    schema = operator_schema(spec)
    jsonschema.Draft7Validator.check_schema(schema)
    defaults = json.loads(json.dumps(spec.config().to_kwargs()))
    jsonschema.Draft7Validator(schema).validate(defaults)
    assert not jsonschema.Draft7Validator(schema).is_valid({"no_such_option": 1})


@needs_cases
def test_schema_and_validator_agree_on_the_shared_wrong_files(rules: jsonschema.Draft7Validator) -> None:
    """The schema may miss what only the validator knows, but calls nothing wrong that the validator accepts."""
    for path in CASES.glob("bad_rules/*.yaml"):
        text = path.read_text(encoding="utf-8")
        if "03-" not in path.name and errors(rules, text):
            assert validated(text)[1].errors, path


def test_a_plan_as_written_fits_its_schema() -> None:
    step = Step("lm_head", "torch.nn.Linear", "linear", "default", {"generate_device": None}, "cpu", "cuda:0", "bfloat16", 12)
    full = step._replace(
        rule=0, alias="x", replicas=("cuda:1",), inside="y", runs={"KLinearMarlin": ("KLinearTorch", "why")}, notes=("n",)
    )
    plan = Plan(
        model=ModelRef("m", "llama", ("LlamaForCausalLM",), "digest", {"a": [1]}),
        rule_file="rules.yaml",
        rule_digest="d",
        rules=(RuleRef("rule-1", "rules.yaml", 1, 3, "default"),),
        steps=(step, full),
        transfers=(Transfer("lm_head", "input", "cpu", "cuda:0"),),
        default_device="cpu",
        dtype="bfloat16",
        remap={"cuda": "cpu"},
    )
    schema = plan_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    written = json.loads(json.dumps(plan_to_json(plan)))
    jsonschema.Draft7Validator(schema).validate(written)
    for broken in ({**written, "format": 2}, {**written, "extra": 1}, {k: v for k, v in written.items() if k != "steps"}):
        assert not jsonschema.Draft7Validator(schema).is_valid(broken)
    written["steps"][0]["weight_bytes"] = "many"
    assert not jsonschema.Draft7Validator(schema).is_valid(written)
