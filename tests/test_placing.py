"""What the `place:` map of a native file means for rules that give no device, and for modules that KTransformers had per layer."""

from __future__ import annotations

import pytest

import ktopt
from ktopt.graph import ModuleGraph
from ktopt.plan import Step
from ktopt.source import SourceFile
from ktopt.trees import load_tree


@pytest.fixture(scope="module")
def deepseek() -> ModuleGraph:
    return load_tree("deepseek-v3")


def step(rules: str, path: str, graph: ModuleGraph) -> Step:
    return ktopt.compile(SourceFile("rules.yaml", f"version: 1\n{rules}"), graph).by_path[path]


TWO_CARDS = """
place:
  "cuda:0": "layer in 0..29"
  "cuda:1": "layer in 30.. | @lm_head"
rules:
  - {match: "@model.layers.*.mlp.experts", replace: KTransformersExperts, kwargs: {generate_device: cpu}, recursive: false}
  - {match: "class=DeepseekV3RotaryEmbedding", replace: RotaryEmbeddingV3}
"""


def test_experts_on_the_cpu_prefill_in_their_layers_place(deepseek: ModuleGraph) -> None:
    early, late = (step(TWO_CARDS, f"model.layers.{n}.mlp.experts", deepseek) for n in (3, 30))
    assert (early.generate_device, early.prefill_device) == ("cpu", "cuda:0")
    assert (late.generate_device, late.prefill_device) == ("cpu", "cuda:1")


def test_without_a_place_prefill_is_where_the_weights_are(deepseek: ModuleGraph) -> None:
    rules = 'rules:\n  - {match: "@lm_head", replace: default, kwargs: {generate_device: "cuda:1"}}'
    assert step(rules, "lm_head", deepseek).prefill_device == "cuda:1"


def test_a_rotary_embedding_is_copied_to_every_place_of_its_layers(deepseek: ModuleGraph) -> None:
    rotary = step(TWO_CARDS, "model.rotary_emb", deepseek)
    assert (rotary.generate_device, rotary.replicas) == ("cuda:0", ("cuda:1",))


def test_a_device_in_the_rule_makes_no_copies(deepseek: ModuleGraph) -> None:
    rules = TWO_CARDS.replace("replace: RotaryEmbeddingV3", 'replace: RotaryEmbeddingV3, kwargs: {generate_device: "cuda:1"}')
    rotary = step(rules, "model.rotary_emb", deepseek)
    assert (rotary.generate_device, rotary.replicas) == ("cuda:1", ())


def test_an_earlier_line_for_todays_own_path_places_it_alone(deepseek: ModuleGraph) -> None:
    rules = TWO_CARDS.replace("place:\n", 'place:\n  "cpu": "@model.rotary_emb"\n')
    rotary = step(rules, "model.rotary_emb", deepseek)
    assert (rotary.generate_device, rotary.replicas) == ("cpu", ())


def test_a_rotary_embedding_that_no_rule_takes_has_one_place(deepseek: ModuleGraph) -> None:
    rules = TWO_CARDS.split('  - {match: "class=')[0]
    rotary = step(rules, "model.rotary_emb", deepseek)
    assert (rotary.generate_device, rotary.replicas) == ("cuda:0", ())


def test_experts_on_the_cpu_hand_their_result_to_their_layers_place(deepseek: ModuleGraph) -> None:
    assert step(TWO_CARDS, "model.layers.30.mlp.experts", deepseek).kwargs["out_device"] == "cuda:1"
    rules = 'rules:\n  - {match: "@model.layers.*.mlp.experts", replace: KTransformersExperts, kwargs: {generate_device: cpu}}'
    assert step(rules, "model.layers.30.mlp.experts", deepseek).kwargs["out_device"] is None


def test_a_device_that_a_rule_gives_as_null_is_none(deepseek: ModuleGraph) -> None:
    rules = TWO_CARDS.replace("{generate_device: cpu}", "{generate_device: cpu, out_device: null}")
    assert step(rules, "model.layers.30.mlp.experts", deepseek).kwargs["out_device"] is None
