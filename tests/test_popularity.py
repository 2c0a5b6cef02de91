"""How often experts are chosen: counted on a model, kept in a file, and what `ktopt place` makes of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from apply_fixtures import PROMPT
from gguf_fixtures import make_gguf, tiny_model
from placed_plans import assert_holds_what_was_said

import ktopt
from ktopt.cli import main
from ktopt.compiler import run_stages
from ktopt.counting import count_experts
from ktopt.diagnostics import KtoptError, Report, UsageError
from ktopt.hardware import load_hardware
from ktopt.parse import parse
from ktopt.pattern.numbers import from_ranges
from ktopt.placing.place import Placing, place
from ktopt.placing.problem import fits, time_us
from ktopt.plan import Plan
from ktopt.plan_options import PlanOptions
from ktopt.popularity import Popularity, check_popularity, layers_of, load_popularity, read_popularity
from ktopt.source import SourceFile
from ktopt.trees import load_tree
from ktopt.validate import validate

EXPERTS = 'version: 1\nrules:\n  - {match: "@model.layers.*.mlp.experts", replace: KTransformersExperts, expect: 48}\n'
MODEL, MACHINE = "qwen3-30b-a3b", "1x3090+64GB"


def skewed(model: str, power: float = 1.0) -> Popularity:
    """A made-up profile: the n-th most chosen expert of a layer is chosen 1 / n**power as often as the first; which that is differs
    from layer to layer."""
    graph = load_tree(model)
    layers = {}
    for number, module in enumerate(layers_of(graph)):
        count = module.parameters[0].shape[0]
        layers[module.path] = tuple(int(1e6 / (1 + (e * 37 + number * 11) % count) ** power) for e in range(count))
    return Popularity(model, graph.model_type, graph.digest, 1000, layers)


def placed(rules: str, machine: str, popularity: Popularity | None, model: str = MODEL) -> Placing:
    hardware = load_hardware(machine)
    ruleset = validate(parse(SourceFile("r.yaml", rules), report := Report()), report)
    assert ruleset is not None
    return place(ruleset, load_tree(model), hardware, PlanOptions(hardware=hardware), None, 4096, popularity)


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("popularity") / "profile.json"
    path.write_text(skewed(MODEL).to_json())
    return path


def choices(model: Any, ids: torch.Tensor) -> dict[str, list[int]]:
    """What transformers' own routers choose, from their outputs."""
    found: dict[str, list[int]] = {}

    def seen(name: str, output: Any) -> None:
        index = next(t for t in output if not t.dtype.is_floating_point)
        found[name.replace(".gate", ".experts")] = torch.bincount(index.flatten(), minlength=model.config.num_experts).tolist()

    hooks = [
        module.register_forward_hook(lambda m, a, out, name=name: seen(name, out))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


FUSED = '  - {match: "@model.layers.*", replace: KDecoderLayer}\n'
SPLIT = (
    '  - {match: "@model.layers.*.mlp.experts", replace: KTransformersExperts, kwargs: {hot_experts: "0..1", hot_device: cpu}}\n'
)


@pytest.mark.parametrize("rules", ["", FUSED, SPLIT])
def test_what_is_counted_is_what_the_routers_choose(rules: str) -> None:
    model = tiny_model("qwen3_moe")
    expected = choices(model, PROMPT)
    if rules:
        model = ktopt.apply(SourceFile("r.yaml", "version: 1\ndtype: float32\nrules:\n" + rules), model)
    profile = count_experts(model, PROMPT[0].tolist())
    assert {path: list(counts) for path, counts in profile.layers.items()} == expected
    assert profile.tokens == PROMPT.numel()
    assert read_popularity(json.loads(profile.to_json()), "x") == profile


def test_a_text_is_counted_in_pieces_and_hooks_are_gone_afterwards() -> None:
    model = tiny_model("mixtral")
    profile = count_experts(model, list(range(5, 25)), piece_tokens=8)
    chosen = model.config.num_experts_per_tok
    assert all(sum(counts) == 20 * chosen for counts in profile.layers.values())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(KtoptError, match="nothing to count"):
        count_experts(tiny_model("llama"), [1, 2])


def test_the_command_counts_a_model_from_a_file(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", moe_intermediate_size=64)
    weights, out, text = make_gguf(tmp_path / "m.gguf", model, "Q8_0"), tmp_path / "p.json", tmp_path / "t.txt"
    text.write_text("some words of a text " * 3)
    assert main(["profile", "--experts", "--weights", str(weights), "--text", str(text), "-o", str(out)]) == 0
    profile = load_popularity(out)
    check_popularity(profile, load_tree(str(weights)))
    assert profile.tokens > 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts", "--weights", "rules"], "which text? Give --text"),
        (["--text", "x"], "--text goes with --experts"),
        (["--experts", "--text", "nowhere", "--weights", "rules"], "can't be read"),
    ],
)
def test_what_the_command_cannot_do_is_said(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err


def edited(**changes: Any) -> dict[str, Any]:
    return {**json.loads(skewed(MODEL).to_json()), **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "not a profile of experts"),
        (edited(format=9), "format 9 of profiles"),
        (edited(layers={"a": [1, -1]}), "layers, 'a': must be a list of counts"),
        (edited(layers={"a": [1, True]}), "layers, 'a': must be a list of counts"),
        (edited(layers={"a": []}), "layers, 'a': must be a list of counts"),
        (edited(layers={"a": [0, 0]}), "no expert was ever chosen"),
        (edited(tokens=-1), "tokens: must be"),
        (edited(model={"source": 3}), "model.source: must be a text"),
    ],
)
def test_what_is_no_profile_is_refused(data: Any, message: str) -> None:
    with pytest.raises(KtoptError, match=message):
        read_popularity(data, "p.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (edited(model={"source": "m", "model_type": "mixtral"}), r"p is of m \(mixtral\), and qwen3-30b-a3b is qwen3_moe"),
        (edited(layers={"model.layers.99.mlp.experts": [1]}), "p counts experts that qwen3-30b-a3b doesn't have: model.layers.99"),
        (edited(layers={"model.layers.0.mlp.experts": [1] * 128}), "has no counts of layers of qwen3-30b-a3b: model.layers.1.mlp"),
        (edited(layers={f"model.layers.{i}.mlp.experts": [1] * 8 for i in range(48)}), "has 8 counts for model.layers.0.mlp.exp"),
    ],
)
def test_a_profile_of_another_model_is_refused(data: Any, message: str) -> None:
    with pytest.raises(KtoptError, match=message):
        check_popularity(read_popularity(data, "p"), load_tree(MODEL), "p")


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        load_popularity(tmp_path / "none.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(KtoptError, match="not JSON"):
        load_popularity(tmp_path / "x.json")


@pytest.mark.parametrize("machine", [MACHINE, "2x3090+64GB", "1x3060-12GB+64GB"])
def test_a_placement_by_popularity_is_better_and_its_plan_holds_what_was_said(machine: str, tmp_path: Path) -> None:
    rules, profile, out = tmp_path / "r.yaml", tmp_path / "p.json", tmp_path / "placed.yaml"
    rules.write_text(EXPERTS)
    popularity = skewed(MODEL)
    profile.write_text(popularity.to_json())
    asked = ["--model", MODEL, "--hardware", machine, "--context", "4096", "--popularity", str(profile), "-o", str(out)]
    assert main(["place", str(rules), *asked]) == 0
    plan = ktopt.compile(out, MODEL, hardware=machine)
    assert not plan.errors
    placing = placed(EXPERTS, machine, popularity)
    assert placing.proved
    assert fits(placing.case.problem, placing.assignment)
    assert placing.token_us == pytest.approx(time_us(placing.case.problem, placing.assignment))
    assert placing.token_us < 0.95 * placed(EXPERTS, machine, None).token_us
    assert_holds_what_was_said(placing, plan, 4096)
    assert any(step.elsewhere for step in plan.steps)
    again = tmp_path / "again.yaml"
    assert main(["place", str(out), *asked[:-1], str(again)]) == 0
    before, after = (yaml.safe_load(path.read_text()) for path in (out, again))
    assert before["place"] == after["place"]
    assert hot_count(before) <= hot_count(after)  # no whole layer's experts pass on a card any more, which makes room


def hot_count(rules: Any) -> int:
    return sum(len(from_ranges(ids)) for ids in rules["rules"][0]["kwargs"]["hot_experts"].values())


def test_hot_experts_are_the_ones_that_are_chosen_most(profile_file: Path) -> None:
    popularity = skewed(MODEL)
    placing = placed(EXPERTS, MACHINE, popularity)
    hot = placing.hot[0]  # type: ignore[index]
    assert len(hot) > 10
    for layer, ids in hot.items():
        counts = popularity.layers[f"model.layers.{layer}.mlp.experts"]
        assert min(counts[i] for i in ids) >= max(count for i, count in enumerate(counts) if i not in ids)


def test_experts_that_nothing_tells_apart_are_placed_no_worse_than_whole_layers() -> None:
    graph = load_tree(MODEL)
    even = {module.path: (1,) * 128 for module in layers_of(graph)}
    placing = placed(EXPERTS, MACHINE, Popularity(MODEL, graph.model_type, graph.digest, 0, even))
    assert placing.token_us <= placed(EXPERTS, MACHINE, None).token_us * (1 + 1e-9)


def test_place_auto_splits_by_popularity_as_ktopt_place_does(profile_file: Path) -> None:
    auto = SourceFile("auto.yaml", EXPERTS.replace("rules:", "place: auto\nrules:"))
    plan = ktopt.compile(auto, MODEL, hardware=MACHINE, popularity=str(profile_file))
    hot = {s.path: dict(s.kwargs["hot_experts"]) for s in plan.steps if s.kwargs.get("hot_experts")}
    assert len(hot) == len(placed(EXPERTS, MACHINE, skewed(MODEL)).hot[0])  # type: ignore[index]
    assert {device for step in plan.steps for device in step.elsewhere} == {"cuda:0"}
    with pytest.raises(UsageError, match="place: auto"):
        ktopt.compile(SourceFile("r.yaml", EXPERTS), MODEL, hardware=MACHINE, popularity=str(profile_file))


def test_popularity_needs_an_operator_that_can_split(profile_file: Path) -> None:
    with pytest.raises(KtoptError, match=r'match: "@model\.layers\.\*\.mlp\.experts", replace: KTransformersExperts'):
        placed("version: 1\nrules: []\n", MACHINE, skewed(MODEL))


@pytest.mark.parametrize(
    "rule",
    [
        '  - {match: "@model.layers.*.mlp.experts", replace: KTransformersExperts}\n',
        '  - {match: "@model.layers.*.mlp.experts", replace: {class: KTransformersExperts, kwargs: {}}}\n',
        '  - match: "@model.layers.*.mlp.experts" # these\n    replace: KTransformersExperts # so\n    expect: 48  # all\n',
        (
            '  - match: "@model.layers.*.mlp.experts"\n    replace: KTransformersExperts\n    kwargs:\n'
            '      out_device: "cuda:0"  # there\n'
            "      generate_op: KExpertsCPU\n    expect: 48\n"
        ),
        (
            '  - match: "@model.layers.*.mlp.experts"\n    replace: KTransformersExperts\n    kwargs:\n      hot_experts:\n'
            '        0: "1"\n      generate_op: KExpertsCPU  # here\n'
        ),
    ],
)
def test_hot_experts_are_written_into_rules_of_any_form(rule: str, profile_file: Path, tmp_path: Path) -> None:
    rules, out = tmp_path / "r.yaml", tmp_path / "placed.yaml"
    rules.write_text("version: 1\nrules:\n" + rule + '  - {match: "@lm_head", replace: default}\n')
    asked = ["--model", MODEL, "--hardware", MACHINE, "--popularity", str(profile_file)]
    assert main(["place", str(rules), *asked, "-o", str(out)]) == 0
    text = out.read_text()
    written = yaml.safe_load(text)["rules"][0]
    kwargs = written.get("kwargs") or written["replace"]["kwargs"]
    assert len(kwargs["hot_experts"]) > 10
    assert [comment in text for comment in ("# these", "# so", "# all", "# there", "# here")] == [
        comment in rule for comment in ("# these", "# so", "# all", "# there", "# here")
    ]
    assert run_stages(SourceFile("o.yaml", text), MODEL, hardware=load_hardware(MACHINE)).report.errors == []
    even = tmp_path / "even.yaml"  # without a profile hot experts stay, and so does the map
    assert main(["place", str(out), *asked[:4], "-o", str(even)]) == 0
    assert even.read_text() == text


def test_61_layers_on_8_cards_are_split_within_2_seconds_of_the_processor() -> None:
    profile = skewed("deepseek-v3", 0.8)
    rules = EXPERTS.replace(", expect: 48", "")
    placed(rules, "1x24GB+2TB", profile, "deepseek-v3")  # imports, and the tree
    start = time.process_time()
    placing = placed(rules, "8x80GB+2TB", profile, "deepseek-v3")
    assert time.process_time() - start < 2
    assert placing.assignment.hot


def plan_of(text: str, **options: Any) -> Plan:
    return ktopt.compile(SourceFile("r.yaml", text), MODEL, hardware=MACHINE, **options)


def test_a_map_may_leave_the_rest_to_ktopt() -> None:
    text = "version: 1\nplace:\n  cpu: '@lm_head | layer in 0..3'\n  auto: rest\nrules: []\n"
    where = {step.path: step.generate_device for step in plan_of(text).steps if step.weight_bytes}
    assert {where["lm_head"], where["model.layers.2.mlp.gate"], where["model.layers.3.mlp.experts"]} == {"cpu"}
    assert where["model.layers.40.self_attn.q_proj"] == "cuda:0"


def test_a_map_that_leaves_the_rest_is_written_without_that_line(tmp_path: Path) -> None:
    rules, out = tmp_path / "r.yaml", tmp_path / "o.yaml"
    rules.write_text("version: 1\nplace:\n  # mine\n  cpu: '@lm_head'\n  auto: rest\nrules: []\n")
    assert main(["place", str(rules), "--model", MODEL, "--hardware", MACHINE, "-o", str(out)]) == 0
    text = out.read_text()
    assert "  # mine\n" in text
    assert list(yaml.safe_load(text)["place"]) == ["cpu", "cuda:0"]
    assert {s.path: s.generate_device for s in ktopt.compile(out, MODEL, hardware=MACHINE).steps if s.weight_bytes} == {
        s.path: s.generate_device for s in plan_of(rules.read_text()).steps if s.weight_bytes
    }


def test_what_auto_may_not_be_in_a_map_is_a_finding() -> None:
    report = ktopt.check(SourceFile("r.yaml", "version: 1\nplace: {auto: '@**'}\nrules: []\n"), MODEL)
    (found,) = report.errors
    assert (found.code, found.help) == (
        "KT207",
        "write `auto: rest`, and a line for each device that you choose yourself",
    )


def test_place_auto_makes_room_for_what_a_run_asks_for_and_says_so() -> None:
    auto = EXPERTS.replace("rules:", "place: auto\nrules:")
    assert "place: auto made room for a context of 4,096 tokens" in plan_of(auto, room=100).notes
    assert "place: auto made room for a context of 32,768 tokens" in plan_of(auto, room=32768).notes
    assert "place: auto made room for a context of 8,192 tokens" in plan_of(auto, room=32768, context=8192).notes
