"""ktopt resolves KTransformers' own rule files as KTransformers did, module by module, on its trees and on today's.

The oracle (tests/oracle) was written from the facts of upstream's behaviour, without ktopt's matcher. Its own tests come first.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from oracle.carry_over import CannotCarryOver, CarryOver, merge
from oracle.compare import differences
from oracle.upstream_semantics import Decision, resolve
from oracle.upstream_trees import CONFIGS, MODULE, UpstreamModule, as_graph, load_config, upstream_tree

from ktopt.compiler import run_stages
from ktopt.graph import ModuleGraph
from ktopt.plan import Plan
from ktopt.source import SourceFile

RULES = CONFIGS.parents[1] / "cases" / "upstream_rules"
LINEAR = "torch.nn.modules.linear.Linear"

MODELS = {
    "DeepSeek-V2-Lite": ["deepseek-v2-lite"],
    "DeepSeek-V2": ["deepseek-v2"],
    "DeepSeek-V3": ["deepseek-v3"],
    "Internlm": ["internlm2.5-7b-1m"],
    "Mixtral": ["mixtral-8x7b", "mixtral-8x22b"],
    "Moonlight": ["moonlight-16b-a3b"],
    "Qwen2": ["qwen2-57b-a14b"],
    "Qwen3": ["qwen3-30b-a3b", "qwen3-235b-a22b"],
}
"""By the beginning of a rule file's name, longest first: the models that it was written for."""

CRASHED_UPSTREAM = {"Internlm2_5-7b-Chat-1m.yaml"}
"""KLlamaModel passes its device in the prefill slot, so that `prefill_device` in its kwargs is a TypeError."""

needs_shared = pytest.mark.skipif(not RULES.is_dir(), reason="the shared cases and facts are not beside this checkout")


def files_and_models() -> Iterator[tuple[Path, str]]:
    for path in sorted(RULES.glob("**/*.yaml")):
        models = next(names for start, names in MODELS.items() if path.name.startswith(start))
        yield from ((path, model) for model in models)


def label(value: Any) -> str:
    return str(value.relative_to(RULES)) if isinstance(value, Path) else str(value)


PAIRS = list(files_and_models())
RUNNABLE = [pair for pair in PAIRS if pair[0].name not in CRASHED_UPSTREAM]


# The oracle itself, against what was run through upstream's own code


def toy(*paths: str, cls: str = "toy.Block") -> list[UpstreamModule]:
    """A tree in pre-order; a path that ends in "proj" is a Linear."""
    return [UpstreamModule(p, (LINEAR if p.endswith("proj") else cls, MODULE)) for p in ("", *paths)]


def rule(name: str | None = None, cls: str | None = None, to: str = "x.Op", **rest: Any) -> dict[str, Any]:
    match = {key: value for key, value in (("name", name), ("class", cls)) if value is not None}
    return {"match": match, "replace": {"class": to}, **rest}


def operators(rules: Iterable[dict[str, Any]], tree: list[UpstreamModule]) -> dict[str, str]:
    return {path: decision.operator for path, decision in resolve(list(rules), tree).items()}


def test_the_first_rule_that_matches_wins() -> None:
    taken = operators([rule("a", to="x.First"), rule("a.proj", to="x.Second")], toy("a", "a.proj"))
    assert taken == {"": "default", "a": "x.First", "a.proj": "x.First"}


def test_names_are_searched_anywhere_in_the_path() -> None:
    assert operators([rule("proj")], toy("a", "a.proj"))["a.proj"] == "x.Op"


def test_a_name_that_ends_in_a_dot_misses_the_layer_itself() -> None:
    taken = operators([rule(r"^model\.layers\.3\.")], toy("model.layers.3", "model.layers.3.proj"))
    assert (taken["model.layers.3"], taken["model.layers.3.proj"]) == ("default", "x.Op")


def test_a_doubled_backslash_matches_nothing() -> None:
    assert set(operators([rule(r"^a\\.proj$")], toy("a", "a.proj")).values()) == {"default"}


def test_a_character_class_of_numbers_is_a_bad_regex() -> None:
    with pytest.raises(re.error, match="bad character range"):
        resolve([rule(r"^layers\.([4-10])\.")], toy("a"))


def test_class_and_name_must_both_hold() -> None:
    taken = operators([rule("a", "torch.nn.Linear")], toy("a", "a.proj", "b.proj"))
    assert [path for path, to in taken.items() if to == "x.Op"] == ["a.proj"]


def test_a_base_class_takes_its_subclasses_and_module_takes_everything() -> None:
    tree = [UpstreamModule("", (MODULE,)), UpstreamModule("a", ("toy.Yarn", "toy.Rotary", MODULE))]
    assert operators([rule(cls="toy.Rotary")], tree) == {"": "default", "a": "x.Op"}
    assert operators([rule(cls="torch.nn.Module")], tree) == {"": "x.Op", "a": "x.Op"}


def test_a_match_with_neither_name_nor_class_is_refused() -> None:
    with pytest.raises(ValueError, match="must have"):
        resolve([rule()], toy("a"))


@pytest.mark.parametrize(("value", "closes"), [(False, True), (None, True), (0, True), (True, False), ("False", False)])
def test_recursive_is_read_as_a_python_truth_value(value: object, closes: bool) -> None:
    decisions = resolve([rule("a$", recursive=value)], toy("a", "a.proj", "ab"))
    assert ("a.proj" not in decisions) == closes
    assert "ab" in decisions


def test_recursive_false_at_the_root_swallows_the_model() -> None:
    assert list(resolve([rule(cls="torch.nn.Module", recursive=False)], toy("a", "a.proj"))) == [""]


def test_without_a_class_a_replacement_only_places() -> None:
    rules = [{"match": {"name": "a"}, "replace": {"kwargs": {"generate_device": "cuda:1"}}}]
    decision = resolve(rules, toy("a"))["a"]
    assert (decision.operator, decision.generate_device, decision.prefill_device) == ("default", "cuda:1", "cuda:0")


def on(device: str, operator: str = "x.Op", at: int | None = 3) -> Decision:
    return Decision(operator, {"generate_device": device}, device, device, at)


def test_aliases_on_several_devices_make_copies() -> None:
    expected = merge("rotary", None, [on("cuda:0"), on("cuda:1"), on("cuda:1")])
    assert (expected.generate_device, expected.replicas) == ("cuda:0", ("cuda:1",))


def test_a_rule_above_the_aliases_rules_decides_by_the_own_path() -> None:
    assert merge("rotary", on("cpu", at=1), [on("cuda:0")]).generate_device == "cpu"
    assert merge("rotary", on("cpu", at=3), [on("cuda:0")]).generate_device == "cuda:0"
    assert merge("rotary", on("cpu", "default", at=None), [on("cuda:0")]).generate_device == "cuda:0"


def test_aliases_with_different_operators_have_no_single_answer() -> None:
    with pytest.raises(CannotCarryOver):
        merge("rotary", None, [on("cuda:0"), on("cuda:0", "x.Other")])


@needs_shared
@pytest.mark.parametrize("model", sorted({model for _, model in PAIRS}))
def test_upstream_trees_hold_exactly_the_published_models_parameters(model: str) -> None:
    built = json.loads(CONFIGS.read_text(encoding="utf-8"))[model]
    count = 0
    for module in upstream_tree(built["config"]):
        for _, shape in module.parameters:
            size = 1
            for length in shape:
                size *= length
            count += size
    # The router's correction bias was a parameter in upstream's copies and is a persistent buffer today.
    assert count == built["params_built"] + built["persistent_buffers"]


# ktopt against the oracle


@dataclass(frozen=True)
class Case:
    """A rule file compiled for a model: on a tree shaped as upstream's was, or on today's."""

    rules: list[dict[str, Any]]
    tree: list[UpstreamModule]
    plan: Plan
    graph: ModuleGraph

    def differences(self, rules: list[dict[str, Any]]) -> tuple[list[str], int]:
        """What the plan does otherwise than upstream would have done with `rules`, and how many modules were compared."""
        return differences(self.plan, self.graph, CarryOver(self.tree, resolve(rules, self.tree)))


def read(path: Path) -> tuple[SourceFile, list[dict[str, Any]]]:
    text = path.read_text(encoding="utf-8")
    return SourceFile(str(path), text), yaml.safe_load(text)


def compiled(path: Path, model: str, today: bool, experts: int | None = 4) -> Case:
    source, rules = read(path)
    config = load_config(model)
    tree = upstream_tree(config, experts)
    compilation = run_stages(source, model if today else as_graph(tree, config, model))
    assert compilation.plan is not None, "\n".join(map(str, compilation.report))
    assert compilation.graph is not None
    return Case(rules, tree, compilation.plan, compilation.graph)


both_trees = pytest.mark.parametrize("today", [False, True], ids=["upstream-tree", "today-tree"])


@needs_shared
@both_trees
@pytest.mark.parametrize(("path", "model"), RUNNABLE, ids=label)
def test_ktopt_resolves_upstreams_file_as_upstream_did(path: Path, model: str, today: bool) -> None:
    case = compiled(path, model, today)
    wrong, compared = case.differences(case.rules)
    assert not wrong, f"{len(wrong)} of {compared} differ:\n" + "\n".join(wrong[:20])
    assert compared > 250


@needs_shared
@both_trees
@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite-Chat-multi-gpu.yaml", "Mixtral.yaml", "Qwen3Moe-serve.yaml"])
def test_a_changed_device_in_any_live_rule_is_a_disagreement(name: str, today: bool) -> None:
    path, model = next(pair for pair in RUNNABLE if pair[0].name == name)
    case = compiled(path, model, today)
    live = {decision.rule for decision in resolve(case.rules, case.tree).values()} - {None}
    assert len(live) > 5
    for number in live:
        changed = copy.deepcopy(case.rules)
        changed[number]["replace"].setdefault("kwargs", {})["generate_device"] = "cuda:7"
        wrong, _ = case.differences(changed)
        assert any("cuda:7" in line for line in wrong), f"nobody noticed a change of rule {number + 1}"


@needs_shared
@both_trees
def test_an_operator_in_anothers_place_is_a_disagreement(today: bool) -> None:
    case = compiled(RULES / "Moonlight-16B-A3B.yaml", "moonlight-16b-a3b", today)
    changed = copy.deepcopy(case.rules)
    for entry in changed:
        entry["replace"]["class"] = entry["replace"]["class"].replace("KMoEGate", "KMoEGateIPEXLLM")
    wrong, _ = case.differences(changed)
    assert len(wrong) == 26  # one router in each layer but the first
    assert all(".gate: KMoEGate, expected KMoEGateIPEXLLM" in line for line in wrong)


@needs_shared
def test_a_rotary_embedding_that_upstream_had_on_four_gpus_is_copied_to_each() -> None:
    case = compiled(RULES / "DeepSeek-V3-Chat-multi-gpu-4.yaml", "deepseek-v3", today=True)
    step = case.plan.by_path["model.rotary_emb"]
    assert (step.operator, step.generate_device) == ("YarnRotaryEmbeddingV3", "cuda:0")
    assert step.replicas == ("cuda:1", "cuda:2", "cuda:3")


@needs_shared
def test_every_expert_a_module_resolves_alike_on_the_whole_model() -> None:
    case = compiled(RULES / "DeepSeek-V3-Chat-multi-gpu-4.yaml", "deepseek-v3", today=False, experts=None)
    wrong, compared = case.differences(case.rules)
    assert not wrong, "\n".join(wrong[:20])
    assert compared > 45_000


@needs_shared
@pytest.mark.parametrize(("path", "model"), [pair for pair in PAIRS if pair not in RUNNABLE], ids=label)
def test_a_file_that_crashed_upstream_is_an_error_at_the_kwarg_that_crashed_it(path: Path, model: str) -> None:
    source, _ = read(path)
    errors = run_stages(source, model).report.errors
    lines = source.text.splitlines()
    assert [e for e in errors if e.code.startswith("KT4") and "prefill_device" in lines[e.span.start.line - 1]], errors
