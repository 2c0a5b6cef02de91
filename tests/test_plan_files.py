"""Plans as files: they come back equal, differences are named, and a damaged file is refused with the field that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from ktopt.plan import ModelRef, Plan, RuleRef, Step, Transfer
from ktopt.plan_json import PlanFileError, dump_lock, dump_plan, load_plan


def step(path: str, **changes: Any) -> Step:
    plain = Step(path, "torch.nn.modules.linear.Linear", "linear", "default", {}, "cuda:0", "cuda:0", "bfloat16", 100)
    return plain._replace(**changes)


def plan(*steps: Step, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "model": ModelRef("tiny", "llama", ("LlamaForCausalLM",), "0" * 64, {"hidden_size": 8, "id2label": {0: "a"}}),
        "rule_file": "rules.yaml",
        "rule_digest": "f" * 64,
        "rules": (RuleRef("first", "rules.yaml", 3, 1, "KTransformersLinear"),),
        "steps": steps,
        "transfers": (Transfer("model.layers.1", "input", "cuda:0", "cuda:1", "model.layers.0"),),
        "default_device": "cuda:0",
        "dtype": "bfloat16",
        "remap": {"cuda": "cpu"},
        "ktopt_version": "0.1.0",
        "transformers_version": "5.24.0",
    }
    return Plan(**{**fields, **changes})


FULL = step(
    "model",
    kwargs={"transfer_map": {30: "cuda:1"}, "generate_op": "KLinearMarlin"},
    rule=0,
    alias="old",
    replicas=("cuda:1",),
    runs={"KLinearMarlin": ("KLinearTorch", "no kernel")},
    notes=("a note",),
)


def test_a_plan_comes_back_equal_from_its_file(tmp_path: Path) -> None:
    made = plan(FULL, step("lm_head", inside="model"))
    (tmp_path / "plan.json").write_text(dump_plan(made))
    assert load_plan(tmp_path / "plan.json") == made


def test_each_module_stands_on_a_line_of_its_own() -> None:
    lines = dump_plan(plan(step("a"), step("b"))).splitlines()
    assert sum('"path": "a"' in line or '"path": "b"' in line for line in lines) == 2


def test_a_lock_file_names_no_versions() -> None:
    assert "version" not in dump_lock(plan(step("a")))


DAMAGE: dict[str, tuple[Any, str]] = {
    "wrong format": (lambda d: d.update(format=99), "format 99"),
    "unknown field": (lambda d: d.update(surprise=1), "surprise"),
    "missing field": (lambda d: d.pop("dtype"), "dtype"),
    "wrong type": (lambda d: d["steps"][0].update(weight_bytes="many"), "weight_bytes"),
    "a bool for a number": (lambda d: d["steps"][0].update(weight_bytes=True), "weight_bytes"),
    "a device that is none": (lambda d: d["steps"][0].update(generate_device="gpu"), "gpu"),
    "a rule that isn't there": (lambda d: d["steps"][0].update(rule=7), "rule 7"),
    "steps that are no list": (lambda d: d.update(steps=5), "steps"),
    "a step that is no object": (lambda d: d.update(steps=["a"]), "steps"),
    "a transfer to nowhere": (lambda d: d["transfers"][0].update(side="top"), "top"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_plan_is_refused_with_what_is_wrong(name: str, tmp_path: Path) -> None:
    damage, said = DAMAGE[name]
    data = json.loads(dump_plan(plan(step("a"))))
    damage(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", "[" * 100_000, '{"steps": 1e999}'])
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanFileError):
        load_plan(path)
