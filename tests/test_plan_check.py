"""A plan file that was edited is refused by whoever reads it, with what differs; so is one that other versions made."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ktopt
from ktopt.cli import main
from ktopt.diagnostics import KtoptError
from ktopt.plan_check import open_plan
from ktopt.plan_json import dump_plan, load_plan
from ktopt.source import SourceFile

RULES = SourceFile(
    "rules.yaml",
    """
- match: {name: '^model\\.layers\\.2\\.mlp$'}
  replace: {class: default, kwargs: {generate_device: 'cuda:1', prefill_device: 'cuda:1'}}
  recursive: false
- match: {name: '^model\\.layers\\.[01]\\.', class: torch.nn.Linear}
  replace: {class: KTransformersLinear, kwargs: {generate_device: cpu, generate_op: KLinearCPUInfer, prefill_device: cpu}}
- match: {name: '^model\\.layers\\.3\\.', class: torch.nn.Linear}
  replace: {class: KTransformersLinear, kwargs: {generate_device: "cuda:2", generate_op: KLinearMarlin, prefill_op: KLinearTorch}}
- match: {name: '^model\\.layers\\.3(\\.|$)'}
  replace: {class: default, kwargs: {generate_device: 'cuda:2', prefill_device: 'cuda:2'}}
- match: {name: '.*'}
  replace: {class: default}
""",
)
CPU_LINEAR = "model.layers.0.self_attn.q_proj"
GPU_LINEAR = "model.layers.3.self_attn.q_proj"
INSIDE = "model.layers.2.mlp.gate_proj"


@pytest.fixture(scope="module")
def honest() -> str:
    """The text of an honest plan with operators on two kinds of device, transfers, and modules inside another."""
    plan = ktopt.compile(RULES, "smollm2-135m", remap={"cuda:2": "cpu"})
    assert plan.transfers
    assert plan.by_path[INSIDE].inside
    assert plan.by_path[GPU_LINEAR].runs
    assert not plan.errors
    return dump_plan(plan)


def step(data: dict[str, Any], path: str) -> dict[str, Any]:
    return next(s for s in data["steps"] if s["path"] == path)


def update(module: str, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: step(data, module).update(changes)


def kwarg(module: str, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: step(data, module)["kwargs"].update(changes)


def swap_two(data: dict[str, Any]) -> None:
    steps = data["steps"]
    steps[5], steps[6] = steps[6], steps[5]


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a step gone": (lambda d: d["steps"].remove(step(d, CPU_LINEAR)), f"{CPU_LINEAR}: in the model, not in the plan"),
    "no steps": (lambda d: d["steps"].clear(), "in the model, not in the plan"),
    "a step renamed": (update(CPU_LINEAR, path="model.layers.0.self_attn.x"), "model.layers.0.self_attn.x: in the plan, not in"),
    "a bogus step": (lambda d: d["steps"].append({**d["steps"][-1], "path": "bogus"}), "bogus: in the plan, not in the model"),
    "a step twice": (lambda d: d["steps"].append(d["steps"][-1]), "lm_head: twice in the plan"),
    "steps in another order": (swap_two, "out of the model's order"),
    "another class": (update(CPU_LINEAR, cls="foo.Bar"), "the plan has foo.Bar, the model has torch.nn.modules.linear.Linear"),
    "another role": (update(CPU_LINEAR, role="experts"), "role experts in the plan, linear in the model"),
    "an op on a device that can't run it": (kwarg(CPU_LINEAR, generate_op="KLinearMarlin"), "KLinearMarlin doesn't run on cpu"),
    "an op that isn't known": (kwarg(CPU_LINEAR, generate_op="KLinearMagic"), "KLinearMagic"),
    "an unknown operator": (update(CPU_LINEAR, operator="NoSuch"), "no operator is named NoSuch"),
    "an operator that its rule doesn't give": (update(CPU_LINEAR, operator="KTransformersExperts"), "its rule gives KTransformers"),
    "an operator without a rule": (lambda d: step(d, CPU_LINEAR).pop("rule"), "no rule that gives it"),
    "an operator that doesn't fit": (update("model.norm", operator="KTransformersLinear", rule=1), "can't take it: it fits"),
    "kwargs that the operator refuses": (kwarg(CPU_LINEAR, bits=3), "takes no `bits`"),
    "kwargs of another type": (kwarg(CPU_LINEAR, generate_op=5), "must be the name of an op"),
    "kwargs that are on another device": (update(CPU_LINEAR, generate_device="cuda:0"), "kwargs say generate_device cpu"),
    "a dtype that is none": (update(CPU_LINEAR, dtype="nonsense"), "dtype 'nonsense'"),
    "the plan's dtype none": (lambda d: d.update(dtype="int4"), "dtype 'int4'"),
    "other bytes": (update(CPU_LINEAR, weight_bytes=1), "weight_bytes 1, and its tensors take 663552"),
    "bytes shared with none": (update(CPU_LINEAR, weight_bytes=0, notes=["shares its weight with model.norm"]), "bytes 0, and"),
    "negative bytes": (update(CPU_LINEAR, weight_bytes=-1), "less than nothing"),
    "a transfer to no module": (lambda d: d["transfers"][0].update(path="nowhere"), "transfer at 'nowhere'"),
    "a transfer after no module": (lambda d: d["transfers"][0].update(after="nowhere"), "after 'nowhere'"),
    "a transfer to no device": (lambda d: d["transfers"][0].update(target="gpu"), "'gpu' is not a device"),
    "a device number beyond torch's": (lambda d: d["transfers"][0].update(target="cuda:300"), "numbers go up to"),
    "no default device": (lambda d: d.update(default_device=""), "default_device"),
    "inside nothing": (update(INSIDE, inside="nowhere"), "inside 'nowhere', which is no module above it"),
    "inside a sibling": (update(INSIDE, inside="model.layers.2.mlp.up_proj"), "which is no module above it"),
    "inside one with no rule of its own": (
        lambda d: (update(INSIDE, inside="model.layers.2")(d), step(d, "model.layers.2").pop("rule")),
        "inside model.layers.2",
    ),
    "inside, and of a rule": (update(INSIDE, rule=1), "one of both is wrong"),
    "an op that gives way for nothing": (update(CPU_LINEAR, runs={"KLinearMarlin": ["KLinearTorch", "x"]}), "`runs` has KLinear"),
    "an op that doesn't give way": (lambda d: step(d, GPU_LINEAR).pop("runs"), "`runs` lacks KLinearMarlin -> KLinearCPUInfer"),
    "an op that gives way to another": (update(GPU_LINEAR, runs={"KLinearMarlin": ["rm -rf", ""]}), "`runs` lacks KLinearMarlin"),
    "a config of another size": (lambda d: d["model"]["config"].update(hidden_size=1152), "weight_bytes"),
    "a config of fewer layers": (lambda d: d["model"]["config"].update(num_hidden_layers=2), "in the plan, not in the model"),
    "a config of no model": (lambda d: d["model"]["config"].update(model_type="evil"), "evil"),
    "another tree": (lambda d: d["model"].update(tree="0" * 64), "`tree` was changed"),
    "a key of many digits": (lambda d: d["model"]["config"].update({"9" * 5000: 1, "hidden_size": 9}), "weight_bytes"),
}  # fmt: skip


def edited(honest: str, name: str, folder: Path) -> Path:
    data = json.loads(honest)
    EDITS[name][0](data)
    path = folder / "plan.json"
    path.write_text(json.dumps(data))
    return path


def test_an_honest_plan_is_taken(honest: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(honest)
    assert open_plan(path) == load_plan(path)


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-3-270m"])
@pytest.mark.parametrize("options", [{}, {"remap": {"cuda": "cpu"}}, {"dtype": "float32"}], ids=["", "remapped", "float32"])
def test_honest_plans_of_other_models_are_taken(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(ktopt.compile(RULES, model, **options)))
    open_plan(path)


def test_every_upstream_rule_files_plan_is_taken(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[2] / "shared" / "cases" / "upstream_rules"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    for name, model in {"Mixtral.yaml": "mixtral-8x7b", "DeepSeek-V2-Lite-Chat-multi-gpu.yaml": "deepseek-v2-lite"}.items():
        path = tmp_path / "plan.json"
        path.write_text(dump_plan(ktopt.compile(folder / name, model)))
        open_plan(path)


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_plan_is_refused_with_what_differs(name: str, honest: str, tmp_path: Path) -> None:
    path = edited(honest, name, tmp_path)
    with pytest.raises(KtoptError) as caught:
        open_plan(path)
    assert EDITS[name][1] in str(caught.value)
    assert len(str(caught.value)) < 5000


COMMANDS = {
    "plan": ["plan", "PLAN"],
    "diff": ["diff", "PLAN", "PLAN"],
    "graph": ["graph", "PLAN"],
    "apply": ["apply", "PLAN", "--weights", "WEIGHTS", "--out", "OUT"],
    "run": ["run", "PLAN", "--weights", "WEIGHTS", "--prompt", "hello"],
}


@pytest.mark.parametrize("name", ["a step gone", "an unknown operator", "another class", "an op on a device that can't run it"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_it(command: str, name: str, honest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"GGUF")
    words = {"PLAN": str(edited(honest, name, tmp_path)), "WEIGHTS": str(weights), "OUT": str(tmp_path / "out")}
    assert main([words.get(word, word) for word in COMMANDS[command]]) == 1
    assert EDITS[name][1] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_api_refuses_it(honest: str, tmp_path: Path) -> None:
    with pytest.raises(KtoptError, match="in the model, not in the plan"):
        ktopt.apply(edited(honest, "a step gone", tmp_path), weights=tmp_path)


def test_a_nested_plan_is_refused(honest: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(honest.replace('"config": {', '"config": {"deep": ' + '{"a":' * 950 + "1" + "}" * 950 + ", "))
    with pytest.raises(KtoptError, match=r"recursion|nested"):
        open_plan(path)


def versions(ktopt_version: str = "", transformers_version: str = "") -> Callable[[str], str]:
    return lambda text: json.dumps(
        {**json.loads(text), **({"ktopt_version": ktopt_version} if ktopt_version else {}),
         **({"transformers_version": transformers_version} if transformers_version else {})}
    )  # fmt: skip


MAJOR, MINOR, _ = ktopt.__version__.split(".")


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (versions(f"{MAJOR}.{MINOR}.99"), ""),
        (versions(f"{MAJOR}.{int(MINOR) + 1}.0"), "made by ktopt"),
        (versions("9.0"), "made by ktopt 9.0"),
        (versions("nonsense"), "made by ktopt nonsense"),
        (versions(transformers_version="5.999.0"), ""),
        (versions(transformers_version="4.57.0"), "made by transformers 4.57.0"),
    ],
)
def test_a_plan_that_other_versions_made_is_refused_unless_forced(change, refused: str, honest: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(change(honest))
    if refused:
        with pytest.raises(KtoptError, match=f"{refused}.*make it again.*--force"):
            open_plan(path)
    else:
        open_plan(path)
    open_plan(path, force=True)


def test_force_on_the_command_line_takes_another_versions_plan(honest: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    path.write_text(versions("9.0")(honest))
    assert main(["plan", str(path)]) == 1
    assert "make it again" in capsys.readouterr().err
    assert main(["plan", str(path), "--force"]) == 0


def test_a_lock_file_which_names_no_versions_is_taken(honest: str, tmp_path: Path) -> None:
    data = {key: value for key, value in json.loads(honest).items() if not key.endswith("_version")}
    path = tmp_path / "lock.json"
    path.write_text(json.dumps(data))
    open_plan(path)


def test_a_large_plan_is_checked_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(ktopt.compile(RULES, "deepseek-v3")))
    start = time.process_time()
    open_plan(path)
    assert time.process_time() - start < 5
