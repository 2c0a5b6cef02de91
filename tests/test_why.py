"""Why a module became what it is."""

from __future__ import annotations

from typing import Any

import pytest
from builders import deepseek_like, origin, rule, rule_set, spec

from ktopt.diagnostics import Report, UsageError
from ktopt.graph import ModuleGraph
from ktopt.match import match
from ktopt.plan_options import PlanOptions
from ktopt.planning import make_plan
from ktopt.selector import parse_selector
from ktopt.why import Explanation, Lost, explain_module, find_modules

LINEAR = spec("KLinear", "linear")
ROTARY = spec("KRotary", "rotary")
EXPERTS = spec("KExperts", "experts")
OLD_ROTARY = "ktransformers.models.modeling_deepseek_v3.DeepseekV3RotaryEmbedding"
GRAPH = deepseek_like(layers=6, dense=2)
RULES = (
    rule(r"^model\.layers\.[0-2]\.", OLD_ROTARY, ROTARY, generate_device="cuda:0"),
    rule(r"^model\.layers\.[3-5]\.", OLD_ROTARY, ROTARY, generate_device="cuda:1"),
    rule(r"^model\.layers\..*(?<!kv_b_proj)$", "torch.nn.Linear", LINEAR, generate_device="cuda:0", generate_op="Plain"),
    rule(r"\.mlp\.experts$", None, EXPERTS, recursive=False, generate_device="cpu"),
    rule(r"^model\.layers\.", None),
)


def why(path: str, *rules: Any, graph: ModuleGraph = GRAPH, remap: dict[str, str] | None = None) -> Explanation:
    ruleset, report = rule_set(*(rules or RULES)), Report()
    matches = match(ruleset, graph, None, report)
    plan = make_plan(ruleset, graph, matches, PlanOptions(remap=remap or {}), report)
    return explain_module(path, ruleset, graph, matches, plan)


def lost(explanation: Explanation) -> dict[int, Lost]:
    return {x.number: x for x in explanation.lost}


def test_the_winner_and_the_clause_that_each_other_rule_failed() -> None:
    found = why("model.layers.4.self_attn.q_a_proj")
    assert found.rule is not None
    assert (found.rule.number, found.operator, found.alias) == (3, "KLinear", "")
    assert {n: x.clause for n, x in lost(found).items()} == {1: "name, class", 2: "class", 4: "name", 5: "order"}
    assert lost(found)[5].reason == "it fits, but rule 3 comes first"
    assert lost(found)[2].reason == f"{OLD_ROTARY} is none of Linear"


def selects(text: str, lets: dict[str, Any] | None = None, *, when: bool = False) -> Any:
    report = Report()
    found = parse_selector(text, origin(1), lets or {}, report, when=when)
    assert not report.items
    return found


def test_the_winner_s_own_clauses_are_shown_with_their_lines() -> None:
    found = why("model.layers.4.mlp.experts")
    assert [(c.key, c.text, c.origin.span.start.line) for c in found.clauses] == [
        ("name", r"\.mlp\.experts$", 32),
        ("recursive", "false", 31),
    ]
    assert r"name: \.mlp\.experts$" in found.render()
    selected = why("lm_head", rule(selector=selects("class=Linear"), when=selects("hw.cuda_sm >= 80", when=True), expect=3))
    assert [(c.key, c.text) for c in selected.clauses] == [("match", "class=Linear"), ("when", "hw.cuda_sm >= 80"), ("expect", "3")]
    assert why("model.norm", rule("nowhere")).clauses == ()


def test_what_is_not_known_is_not_said_to_fail() -> None:
    found = why("lm_head", rule(selector=selects("class=Linear & quant=Q4_K")), rule(selector=selects("hw.cuda_sm >= 80")))
    assert lost(found)[1].reason == "whether quant=Q4_K holds is not known: give --weights"
    assert lost(found)[2].reason == "whether hw.cuda_sm >= 80 holds is not known: plan with --hardware"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("@lm_head", "@lm_head does not hold"),
        ("@model.** & class=Linear & layer in 0..2", "layer in 0..2 does not hold"),
        ("@lm_head & class=Embedding", "@lm_head does not hold; class=Embedding does not hold"),
        ("@model.** - name=q_a_proj", "name=q_a_proj takes it out"),
        ("(@model.** & layer in 0..2) - name=zzz", "layer in 0..2 does not hold"),
        ("$early & class=Linear", "layer in 0..1 does not hold (in $early)"),
    ],
)
def test_the_part_of_a_selector_that_failed(text: str, reason: str) -> None:
    lets = {"early": selects("@model.** & layer in 0..1")}
    found = why("model.layers.4.self_attn.q_a_proj", rule(selector=selects(text, lets)))
    assert (lost(found)[1].clause, lost(found)[1].reason) == ("selector", reason)


def test_a_rule_that_is_off_names_its_condition() -> None:
    off = rule("q_a_proj", None, when=selects("config.num_hidden_layers >= 60", when=True))
    found = why("model.layers.4.self_attn.q_a_proj", off)
    assert lost(found)[1].clause == "when"
    assert lost(found)[1].reason == "config.num_hidden_layers >= 60 does not hold"


def test_a_negative_pattern_s_failure_is_named() -> None:
    found = why("model.layers.4.self_attn.kv_b_proj")
    assert found.operator == "default"
    assert lost(found)[3].clause == "name"
    assert "kv_b_proj" in lost(found)[3].reason


def test_each_kwarg_says_where_it_comes_from() -> None:
    sources = {k.name: (k.value, k.source) for k in why("model.layers.4.self_attn.q_a_proj").kwargs}
    assert sources["generate_device"] == ("cuda:0", "rules.yaml:24")
    assert sources["generate_op"] == ("Plain", "rules.yaml:24")
    assert sources["transfer_map"] == (None, "default")


def test_a_device_that_nobody_gave_comes_from_the_default_device() -> None:
    sources = {k.name: k.source for k in why("model.norm", rule("norm", None)).kwargs}
    assert sources["generate_device"] == "default device, cuda:0"


def test_a_remapped_device_says_what_the_file_has() -> None:
    found = why("model.layers.4.self_attn.q_a_proj", remap={"cuda": "cpu"})
    (device,) = (k for k in found.kwargs if k.name == "generate_device")
    assert (device.value, device.source) == ("cpu", "rules.yaml:24, where it is cuda:0; remapped")


def test_a_module_below_a_closed_one_names_its_owner() -> None:
    found = why("model.layers.3.mlp.experts.act_fn")
    assert (found.rule, found.closed_by) == (None, "model.layers.3.mlp.experts")
    assert lost(found)[5].clause == "closed"
    assert "rule 4 took model.layers.3.mlp.experts" in lost(found)[5].reason
    assert "part of model.layers.3.mlp.experts" in found.render()


def test_an_older_path_finds_the_module_and_the_copies_are_explained() -> None:
    found = why("model.layers.4.self_attn.rotary_emb")
    assert found.path == "model.rotary_emb"
    assert found.alias == "model.layers.0.self_attn.rotary_emb"
    assert found.replicas == ("cuda:1",)
    assert lost(found)[2].clause == "alias"
    assert "a copy on cuda:1" in lost(found)[2].reason
    assert "asked for by its older path model.layers.4.self_attn.rotary_emb" in found.render()


def test_a_module_that_no_rule_takes() -> None:
    found = why("lm_head")
    assert found.rule is None
    assert "no rule takes it" in found.render()
    assert len(found.lost) == len(RULES)


def test_the_text_stands_in_columns_and_names_lines() -> None:
    text = why("model.layers.4.self_attn.q_a_proj").render()
    assert "  rule 3 at rules.yaml:21 decides\n" in text
    assert "\nkwargs\n  generate_device = cuda:0  line 24\n" in text
    assert "\nother rules of rules.yaml\n  line 1   rule 1  name, class  " in text


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("model.layers.3.mlp.gat", "model.layers.3.mlp.gate"),
        ("layers.3.mlp.gate", "model.layers.3.mlp.gate"),
        ("model.layer.3.self_attn", "model.layers.3.self_attn"),
    ],
)
def test_an_unknown_module_names_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {near}"):
        find_modules(asked, GRAPH)


def test_nothing_near_points_to_the_tree() -> None:
    with pytest.raises(UsageError, match="ktopt inspect deepseek-like"):
        find_modules("zzz", GRAPH)


def test_of_a_pattern_the_first_module_is_told_and_which_are_treated_otherwise() -> None:
    found = why("model.layers.{1..4}.self_attn.q_a_proj")
    assert (found.path, found.of, found.otherwise) == ("model.layers.1.self_attn.q_a_proj", 4, ())
    assert "the first of 4 modules of model.layers.{1..4}.self_attn.q_a_proj, all alike" in found.render()
    mixed = why("model.layers.{1..4}.self_attn.{q_a_proj,kv_b_proj}")
    assert mixed.otherwise == tuple(f"model.layers.{i}.self_attn.kv_b_proj" for i in range(1, 5))
    assert "4 are treated otherwise: model.layers.{1..4}.self_attn.kv_b_proj" in mixed.render()


def test_a_pattern_of_no_module_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no module"):
        find_modules("model.layers.{90..91}.mlp", GRAPH)
