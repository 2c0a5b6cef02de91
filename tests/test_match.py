"""Which rule decides each module: against a plain restatement of the language, and its cases one by one."""

import re
import time

import pytest
from builders import LINEAR, LIST, OLD_V3, Row, decide, deepseek_like, make_graph, origin, rule, rule_set
from hypothesis import given, settings
from hypothesis import strategies as st

from ktopt.diagnostics import Report
from ktopt.match import match
from ktopt.selector import parse_selector
from ktopt.treeindex import members, names_class, set_of

NORM = ("pkg.RMSNorm", "torch.nn.modules.module.Module")


def rules_of(matches):
    return {m.path: d.rule for m, d in zip(matches.graph, matches.decisions, strict=True)}


def test_the_first_rule_in_the_file_wins():
    graph = make_graph(["model.a", "model.b"])
    assert rules_of(decide(graph, rule(r"a$"), rule(r"model\."))) == {"": None, "model": None, "model.a": 0, "model.b": 1}


def test_a_name_is_searched_anywhere_in_the_path():
    graph = make_graph(["model.layers.1", "model.layers.10", "lm_head"])
    assert rules_of(decide(graph, rule(r"layers\.1")))["model.layers.10"] == 0
    assert rules_of(decide(graph, rule(r"^head")))["lm_head"] is None


def test_name_and_class_must_both_hold():
    graph = make_graph([Row("a.proj", LINEAR), Row("a.norm", NORM), Row("b.proj", LINEAR)])
    decided = rules_of(decide(graph, rule(r"^a\.", "torch.nn.Linear")))
    assert [path for path, r in decided.items() if r == 0] == ["a.proj"]


@pytest.mark.parametrize(
    ("written", "dotted", "same"),
    [
        ("torch.nn.Linear", "torch.nn.modules.linear.Linear", True),
        ("torch.nn.modules.linear.Linear", "torch.nn.modules.linear.Linear", True),
        ("Linear", "torch.nn.modules.linear.Linear", True),
        ("torch.nn.Linear", "torch.nn.modules.linear.NonDynamicallyQuantizableLinear", False),
        ("torch.nn.Linear", "mine.torch.Linear", False),
        ("near", "torch.nn.modules.linear.Linear", False),
        ("torch", "torch.nn.modules.linear.Linear", False),
        ("ktransformers.models.modeling_deepseek_v3.MoEGate", "ktransformers.models.modeling_deepseek_v3.MoEGate", True),
    ],
)
def test_a_class_is_named_in_full_by_its_last_part_or_by_package_and_last_part(written, dotted, same):
    assert names_class(written, dotted) is same


def test_a_class_takes_subclasses_and_torch_nn_module_takes_everything():
    graph = make_graph([Row("a", ("mine.MyLinear", *LINEAR)), Row("b", NORM)])
    assert rules_of(decide(graph, rule(cls="torch.nn.Linear"))) == {"": None, "a": 0, "b": None}
    assert set(rules_of(decide(graph, rule(cls="torch.nn.Module"))).values()) == {0}


def test_recursive_false_takes_the_subtree_out_of_every_rule_whatever_their_order():
    graph = make_graph([Row("mlp.experts", LIST), Row("mlp.experts.0.up", LINEAR), Row("mlp.gate", LINEAR)])
    matches = decide(graph, rule(cls="torch.nn.Linear"), rule(r"experts$", recursive=False))
    by_path = dict(zip(graph.by_path, matches.decisions, strict=True))
    assert by_path["mlp.experts"].rule == 1
    assert by_path["mlp.experts.0.up"].rule is None
    assert by_path["mlp.experts.0.up"].closed_by == graph.by_path["mlp.experts"].index
    assert by_path["mlp.gate"].rule == 0


def test_a_rule_that_did_not_win_closes_nothing():
    graph = make_graph([Row("experts", LIST), Row("experts.0", LINEAR)])
    matches = decide(graph, rule(r"^experts$"), rule(r"^experts$", recursive=False), rule("0"))
    assert rules_of(matches)["experts.0"] == 2


def test_a_module_may_be_named_by_an_older_class_and_path():
    graph = make_graph([Row("model.layers.0.mlp", NORM, (), ("model.layers.0.block_sparse_moe",), ("old.SparseMoe",))])
    matches = decide(graph, rule(r"block_sparse_moe$", "old.SparseMoe"))
    decision = matches.decisions[graph.by_path["model.layers.0.mlp"].index]
    assert (decision.rule, decision.alias, decision.alias_rules) == (0, "model.layers.0.block_sparse_moe", (0,))


def rotary(*rules):
    graph = deepseek_like(layers=40)
    return decide(graph, *rules).decisions[graph.by_path["model.rotary_emb"].index]


CLS = f"{OLD_V3}DeepseekV3RotaryEmbedding"
LOW, HIGH = r"^model\.layers\.([0-9]|[12][0-9])\.", r"^model\.layers\.(3[0-9])\."


def test_aliases_in_several_rules_are_all_kept():
    decision = rotary(rule(LOW, CLS, generate_device="cuda:0"), rule(HIGH, CLS, generate_device="cuda:1"))
    assert decision.alias_rules == (0, 1)
    assert (decision.rule, decision.alias) == (0, "model.layers.0.self_attn.rotary_emb")


def test_an_earlier_rule_for_the_modules_own_path_decides_over_its_aliases():
    decision = rotary(rule(r"^model\.rotary_emb$"), rule(LOW, CLS))
    assert (decision.rule, decision.alias, decision.alias_rules) == (0, "", ())


def test_a_later_rule_for_the_modules_own_path_does_not():
    decision = rotary(rule(LOW, CLS), rule(r"rotary_emb$"))
    assert decision.alias_rules == (0, 1)
    assert rotary(rule(LOW, CLS), rule(r"^model\.rotary_emb$")).alias_rules == (0,)


def test_an_alias_inside_a_closed_module_names_nothing():
    decision = rotary(rule(r"self_attn$", recursive=False), rule(LOW, CLS))
    assert decision.rule is None


def test_a_rule_that_takes_a_path_by_class_alone_is_decided_by_aliases_with_one_rule():
    assert rotary(rule(cls=CLS)).alias_rules == (0,)


def test_takes_counts_what_a_rule_selects_and_won_what_it_decides():
    graph = make_graph([Row("a.x", LINEAR), Row("a.y", LINEAR), "b"])
    matches = decide(graph, rule(r"x$"), rule(r"^a\."))
    assert [graph.modules[i].path for i in members(matches.takes(1))] == ["a.x", "a.y"]
    assert [graph.modules[i].path for i in members(matches.won(1))] == ["a.y"]


def test_a_modules_device_is_its_rules_then_the_default_and_a_closed_module_has_its_owners():
    graph = make_graph([Row("experts", LIST), Row("experts.0", LINEAR), "norm", "head"])
    matches = decide(graph, rule("^experts$", generate_device="cpu", recursive=False), rule("norm"), default_device="cuda:0")
    devices = {m.path: matches.device(m.index) for m in graph}
    assert devices == {"": "cuda:0", "experts": "cpu", "experts.0": "cpu", "norm": "cuda:0", "head": "cuda:0"}


def test_a_pattern_that_backtracks_for_ever_is_reported_at_its_rule_and_takes_nothing():
    graph = make_graph([f"m.{'self_attn.q_proj.' * 30}{i}" for i in range(300)])
    report = Report()
    start = time.process_time()
    matches = match(rule_set(rule("^m$"), rule(r"^(([a-z_.])+.)+[A-Z]([a-z])+$")), graph, None, report)
    assert time.process_time() - start < 5
    (found,) = report.items
    assert (found.code, found.span.start.line) == ("KT304", 12)
    assert "rule 2" in found.message
    assert matches.won(1) == 0


def test_unfit_regexes_are_reported_too():
    report = Report()
    match(rule_set(rule("[4-10]")), make_graph(["a"]), None, report)
    assert [(d.code, d.span.start.line) for d in report] == [("KT304", 2)]


@given(st.sets(st.integers(0, 200)), st.integers(201, 400))
def test_sets_of_indices_keep_their_members(indices, size):
    assert set(members(set_of(indices, size))) == indices


def naive_winner(rules, path, names):
    for i, (name, cls, _) in enumerate(rules):
        if (cls is None or any(names_class(cls, n) for n in names)) and (name is None or re.search(name, path)):
            return i
    return None


def naive_decisions(graph, rules):
    """The language restated without indices, caches or prefix filters; modules without aliases."""
    closed_by: dict[str, int] = {}
    out = []
    for module in graph:
        owner = next((closed_by[a.path] for a in graph.ancestors(module) if a.path in closed_by), None)
        winner = None if owner is not None else naive_winner(rules, module.path, module.cls.mro)
        if winner is not None and not rules[winner][2]:
            closed_by[module.path] = module.index
        out.append((winner, owner))
    return out


NAMES = st.sampled_from(
    [
        None,
        r"^model\.layers\.([0-9]|1[0-9])\.",
        r"^model\.layers\.(0|[1-9])\.mlp\.experts$",
        r"^model\.layers\.1",
        r"^model\.layers$",
        r"experts\.[0-9]*[13]\.",
        r"(^model\.layers\.([12][0-9])\.)|(model.norm)",
        r"^model\.layers\..*\.mlp$",
        r"up_proj$",
        r"^model\.layers\.(?!.*self_attn).*$",
        r"^(?i:MODEL)\.layers\.2",
        r"(?i)^MODEL\.LAYERS\.3\.",
        r"^model.layers.4.mlp.experts.\d+$",
        r"^model\.layers\.[^0-9]*1?\d\.mlp\.experts\.7",
        r"^lm_head",
    ]
)
CLASSES = st.sampled_from([None, "torch.nn.Linear", "torch.nn.Module", "DeepseekV3MLP", "torch.nn.ModuleList"])
BIG = deepseek_like(layers=24, dense=2, experts=70, rotary_aliases=False)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(NAMES, CLASSES, st.booleans()), min_size=1, max_size=6))
def test_decisions_are_those_of_the_language_restated(rules):
    rules = [r if r[0] or r[1] else (r"mlp$", None, r[2]) for r in rules]
    matches = decide(BIG, *(rule(name, cls, recursive=recursive) for name, cls, recursive in rules))
    assert [(d.rule, d.closed_by) for d in matches.decisions] == naive_decisions(BIG, rules)


@settings(max_examples=20, deadline=None)
@given(NAMES, CLASSES)
def test_takes_is_every_module_whose_name_and_class_fit(name, cls):
    expected = [m.index for m in BIG if naive_winner([(name, cls, True)], m.path, m.cls.mro) is not None]
    assert list(members(decide(BIG, rule(name, cls)).takes(0))) == expected


def test_a_pattern_that_used_up_its_time_on_a_tree_is_not_tried_again_at_once():
    graph = deepseek_like(4)
    slow = rule(r"^(?:[a-z_]+|[a-z_.0-9]|[a-z])+[A-Z]$")
    times = []
    for _ in range(2):
        report, start = Report(), time.process_time()
        match(rule_set(slow), graph, None, report)
        times.append(time.process_time() - start)
        assert [d.code for d in report] == ["KT304"]
    assert times[1] < times[0] / 2


def test_selectors_that_name_one_another_twice_over_and_over_match_in_no_time():
    lets, report = {}, Report()
    for i in range(29):
        lets[f"a{i}"] = parse_selector(f"$a{i - 1} | $a{i - 1}" if i else "@model.**", origin(1), lets, report)
    start = time.process_time()
    matches = decide(deepseek_like(3), rule(selector=lets["a28"]))
    assert matches.won(0)
    assert time.process_time() - start < 1
