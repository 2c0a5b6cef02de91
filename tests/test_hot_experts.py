"""Experts on two devices: results as those of whole layers and of transformers, bytes counted where they are, what is refused."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from apply_fixtures import PROMPT
from gguf_fixtures import make_folder, make_gguf, tiny_model
from pretend_device import DEVICE, PretendDevice
from test_experts_operator import INNER, E, Stored, calls, close, context, original, theirs
from transformers import AutoModelForCausalLM

import ktopt
from ktopt.applying.dry_run import dry_run
from ktopt.cli import main
from ktopt.diagnostics import KtoptError
from ktopt.operators.modules.experts import KTransformersExperts
from ktopt.operators.modules.experts_cpu import KExpertsCPU
from ktopt.operators.modules.experts_split import KSplitExperts
from ktopt.plan import Plan
from ktopt.plan_check import open_plan
from ktopt.plan_diff import device_bytes, diff_plans
from ktopt.plan_json import PlanFileError, dump_plan, plan_from_json, plan_to_json
from ktopt.source import SourceFile
from ktopt.working_memory import working_memory

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = """\
version: 1
dtype: float32
place: {{cpu: "@**.experts", "cuda:0": "@**"}}
rules:
  - match: "@model.layers.*.mlp.experts"
    replace: KTransformersExperts
    kwargs:
      hot_experts: {hot}
"""
HOT = '{0: "0..1, 3", 1: 2, 2: "1"}'


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def split(source: Any, hot: str = "1, 3..4", **kwargs: Any) -> Any:
    whole = original()
    built_for = context(whole, source, hot_experts=hot, **kwargs)
    with torch.device("meta"):
        experts: Any = KTransformersExperts.build(whole, built_for)
    with torch.no_grad():
        experts.load_tensors(built_for)
    assert type(experts) is KSplitExperts
    return experts


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("F32", "F32")])
@pytest.mark.parametrize("tokens", [0, 1, 7, 40, 600])
@torch.no_grad()
def test_a_split_layer_agrees_with_transformers_experts(kinds: tuple[str, str], tokens: int) -> None:
    source = Stored(*kinds)
    source.weights = source.weights if kinds[0] != "F32" else {name: weight * 0.05 for name, weight in source.weights.items()}
    if kinds[0] == "F32":
        source.parts = {name: [] for name in source.parts}
    experts, arguments = split(source), calls(max(tokens, 1))
    arguments = tuple(each[:tokens] for each in arguments)
    found = experts(*arguments)
    assert found.shape == (tokens, 256)
    assert close(found, theirs(source.weights)(*arguments))


@torch.no_grad()
def test_each_side_has_its_own_op_and_the_cold_one_the_file_s_blocks() -> None:
    source = Stored("Q4_K", "Q6_K")
    hot, cold = split(source).sides
    assert type(hot.experts) is KTransformersExperts
    assert hot.experts.gate_up_proj.shape == (3, 2 * INNER, 256)
    assert torch.equal(hot.experts.gate_up_proj, source.weights["gate_up_proj"][[1, 3, 4]])
    assert type(cold.experts) is KExpertsCPU
    assert [part.kind for part in cold.experts.stored.gate_up] == ["Q4_K"] * 8
    assert torch.equal(cold.experts.down_proj, source.weights["down_proj"][[0, 2, 5, 6]])


@torch.no_grad()
def test_a_split_layer_is_copied_saved_cast_and_loaded_as_a_whole_one() -> None:
    source, arguments = Stored("Q4_K", "Q6_K"), calls(5)
    experts = split(source)
    expected = experts(*arguments)
    assert torch.equal(copy.deepcopy(experts)(*arguments), expected)
    saved = io.BytesIO()
    torch.save(experts.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved)
    assert {name: weight.shape for name, weight in state.items()} == {n: w.shape for n, w in source.weights.items()}
    assert torch.equal(state["gate_up_proj"], source.weights["gate_up_proj"])
    other = split(Stored("Q8_0", "Q8_0"), hot="0")
    other.load_state_dict(state)
    assert close(other(*arguments), expected)
    experts.to(torch.bfloat16)
    assert experts.down_proj.dtype is torch.bfloat16
    assert close(experts(*arguments), expected)


@torch.no_grad()
def test_an_expert_that_is_not_there_is_an_error() -> None:
    x, index, weights = calls(3)
    for wrong in (-1, E):
        index[1, 1] = wrong
        with pytest.raises(KtoptError, match=rf"chose expert {wrong}, and there are experts 0 to 6"):
            split(Stored("Q4_K", "Q6_K"))(x, index, weights)


def compiled(model: Any, hot: str = HOT, **options: Any) -> Plan:
    return ktopt.compile(SourceFile("r.yaml", RULES.format(hot=hot)), model, **options)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("how", ["gguf", "safetensors", "in hand"])
@torch.no_grad()
def test_a_model_with_split_layers_answers_as_transformers_do(kind: str, how: str, tmp_path: Path) -> None:
    model = tiny_model(kind, moe_intermediate_size=64)
    expected = model(PROMPT).logits
    weights: Any = None
    if how == "gguf":
        weights = make_gguf(tmp_path / "m.gguf", model, "Q8_0")
        expected = model(PROMPT).logits
    elif how == "safetensors":
        weights = make_folder(tmp_path / "hf", model)
    plan = compiled(weights or model, remap={"cuda": "cpu"}, **({"weights": weights} if weights else {}))
    assert not plan.errors
    applied = ktopt.apply(plan, None if weights else model, weights)
    assert sum(type(module) is KSplitExperts for module in applied.modules()) >= 1
    assert close(applied(PROMPT).logits, expected)


@torch.no_grad()
def test_a_folder_with_split_layers_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", moe_intermediate_size=64)
    weights, rules = str(make_folder(tmp_path / "hf", model)), tmp_path / "rules.yaml"
    rules.write_text(RULES.format(hot='{0: "0..1", 1: "2"}'))
    asked = ["apply", str(rules), "--model", weights, "--weights", weights, "--remap", "cuda=cpu", "--out", str(tmp_path / "out")]
    assert main(asked) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sum(type(module) is KSplitExperts for module in loaded.modules()) == 2
    assert close(loaded(PROMPT).logits, model(PROMPT).logits)


@pytest.fixture(scope="module")
def tiny() -> Any:
    with torch.device("meta"):
        return tiny_model("qwen3_moe", num_hidden_layers=3)


def test_a_plan_counts_hot_experts_where_their_block_is(tiny: Any) -> None:
    plan = compiled(tiny)
    whole = ktopt.compile(SourceFile("r.yaml", RULES.format(hot="{}").replace("hot_experts: {}", "generate_device: cpu")), tiny)
    for layer, count in ((0, 3), (1, 1), (2, 1)):
        path = f"model.layers.{layer}.mlp.experts"
        step, other = plan.by_path[path], whole.by_path[path]
        experts = tiny.config.num_experts
        assert step.generate_device == "cpu"
        assert step.kwargs["hot_device"] == "cuda:0"
        assert list(step.kwargs["hot_experts"]) == [layer]
        assert [t.side for t in plan.transfers if t.path == path] == ["input"]  # results are summed where the block is
        assert step.elsewhere == {"cuda:0": other.weight_bytes // experts * count}
        assert step.weight_bytes == other.weight_bytes
    moved = sum(sum(step.elsewhere.values()) for step in plan.steps)
    before, after = device_bytes(whole), device_bytes(plan)
    assert (after["cuda:0"] - before["cuda:0"], before["cpu"] - after["cpu"]) == (moved, moved)
    memory, before_it = ({m.device: m for m in working_memory(each, 64)} for each in (plan, whole))
    assert {device: m.weight_bytes for device, m in memory.items()} == after
    assert memory["cuda:0"].prefill.module == "model.layers.0.mlp.experts"
    assert memory["cuda:0"].prefill.nbytes > before_it["cuda:0"].prefill.nbytes
    assert {f.name for change in diff_plans(whole, plan).changes for f in change.fields} >= {"elsewhere", "kwargs.hot_experts"}


def test_a_plan_with_hot_experts_is_written_read_and_checked(tmp_path: Path) -> None:
    plan = compiled("qwen3-30b-a3b")
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(plan))
    assert open_plan(path) == plan
    data = plan_to_json(plan)
    row = next(step for step in data["steps"] if step.get("elsewhere"))
    row["elsewhere"]["cuda:0"] += 2
    path.write_text(dump_plan(plan_from_json(data)))
    with pytest.raises(PlanFileError, match="elsewhere"):
        open_plan(path)
    row["elsewhere"]["cuda:0"] = row["weight_bytes"] + 1
    with pytest.raises(PlanFileError, match="isn't a part of its weight_bytes"):
        plan_from_json(data)


def test_a_plan_with_hot_experts_runs_on_its_real_devices(tiny: Any) -> None:
    dry_run(compiled(tiny))


@pytest.mark.parametrize(
    ("hot", "code", "message"),
    [
        ('{0: "0..9"}', "KT407", "has experts 0 to 7, and `hot_experts` names 9"),
        ('{0: "0..7"}', "KT407", "names all 8 experts of model.layers.0.mlp.experts"),
        ('{0: "0..x"}', "KT405", "of layer 0: '0..x' is neither a number nor a range"),
        ('{0: "\u0663"}', "KT405", "is neither a number nor a range"),
        ('{-1: "2"}', "KT405", "there is no layer -1"),
        ('{1: "9"}', "KT407", "model.layers.1.mlp.experts has experts 0 to 7, and `hot_experts` names 9"),
        ('{0: "1, 1"}', "KT405", "1 is named twice"),
        ('{0: "0..99999999"}', "KT405", "numbers go up to 65,535"),
        ("[1, 2]", "KT404", "must be"),
    ],
)
def test_hot_experts_that_cannot_be_are_findings(hot: str, code: str, message: str, tiny: Any) -> None:
    report = ktopt.check(SourceFile("r.yaml", RULES.format(hot=hot)), tiny)
    (found,) = report.errors
    assert (found.code, message in found.message) == (code, True), found.message


def test_hot_experts_of_layers_that_are_not_there_are_warned_of(tiny: Any) -> None:
    report = ktopt.check(SourceFile("r.yaml", RULES.format(hot='{0: "1", 99: "2"}')), tiny)
    (found,) = (each for each in report.sorted() if each.severity.value == "warning")
    assert (found.code, "names layer 99, and the rule takes layers 0-" in found.message) == ("KT306", True)


def test_a_fused_layer_over_split_experts_is_left_as_it_is_and_the_plan_says_so() -> None:
    rules = (
        "version: 1\ndtype: float32\nrules:\n"
        '  - {match: "@model.layers.*", replace: KDecoderLayer}\n'
        '  - {match: "@model.layers.*.mlp.experts", replace: KTransformersExperts, '
        'kwargs: {hot_experts: {0: "1"}, hot_device: cpu}}\n'
    )
    model = tiny_model("qwen3_moe")
    expected = model(PROMPT).logits
    plan = ktopt.compile(SourceFile("r.yaml", rules), model)
    notes = {step.path: step.notes for step in plan.steps if step.role == "layer"}
    assert notes["model.layers.0"] == ("left as it is: model.layers.0.mlp.experts has experts on two devices, and runs by itself",)
    assert not notes["model.layers.1"]
    applied = ktopt.apply(plan, model)
    names = [type(layer).__name__ for layer in applied.model.layers]
    assert names[:2] == ["Qwen3MoeDecoderLayer", "KQwen3MoeDecoderLayer"]
    with torch.no_grad():
        assert close(applied(PROMPT).logits, expected)


@pytest.mark.parametrize("tokens", [1, 7])
@torch.no_grad()
def test_no_operation_mixes_the_devices_of_the_two_sides(tokens: int) -> None:
    """The hot side on a device that refuses what a GPU would, with numbers."""
    experts, arguments = split(Stored("Q4_K", "Q6_K")), calls(tokens)
    expected = experts(*arguments)
    with PretendDevice():
        hot = experts.sides[0]
        hot.device = DEVICE
        hot.experts._parameters = {name: weight.to(DEVICE) for name, weight in hot.experts._parameters.items()}
        found = experts(*arguments)
        experts.out_device = "meta"
        there = experts(*arguments)
        assert there.device == DEVICE
        there = there.to("cpu")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(there, expected)
