"""What check says of a rule file on a model: real files are not blamed, wrong ones are, at the right line."""

from pathlib import Path

import pytest
from builders import EMBEDDING, LINEAR, LIST, OLD_V3, V3, Row, deepseek_like, make_graph, origin, rule, rule_set, spec, weight

from ktopt.compiler import run_stages
from ktopt.diagnostics import Report
from ktopt.match import match
from ktopt.placement import Device, Hardware
from ktopt.ruleset import Place
from ktopt.selection import check_selection
from ktopt.selector import parse_selector
from ktopt.source import SourceFile

CASES = Path(__file__).parent.parent.parent / "shared" / "cases"
NORM = ("pkg.RMSNorm", "torch.nn.modules.module.Module")
LAYERS = make_graph(
    [Row(f"model.layers.{i}.proj", LINEAR, weight(4, 4)) for i in range(24)] + [Row("lm_head", LINEAR, weight(4, 4))]
)


def selector(text):
    report = Report()
    found = parse_selector(text, origin(1), {}, report)
    assert found is not None, report.items
    return found


def check(graph, *rules, hardware=None, **rest):
    report = Report()
    check_selection(match(rule_set(*rules, **rest), graph, hardware, report), report)
    return report.sorted()


def found(code, diagnostics):
    (diagnostic,) = [d for d in diagnostics if d.code == code]
    return diagnostic


def codes(diagnostics, *severities):
    return [d.code for d in diagnostics if not severities or d.severity in severities]


def test_a_rule_whose_class_is_not_in_the_model_matches_nothing_and_the_nearest_class_is_named():
    d = found("KT301", check(deepseek_like(5), rule(cls=f"{OLD_V3}DeepseekV3MOE")))
    assert d.span.start.line == 3
    assert "no module of deepseek-like" in d.message
    assert f"did you mean {V3}MoE" in d.help


def test_a_misspelt_segment_of_a_name_is_found():
    d = found("KT301", check(deepseek_like(3), rule(r"^model\.layers\..*\.self_atn\.q_a_proj$")))
    assert (d.span.start.line, d.help) == (2, "no path has self_atn; did you mean self_attn?")


def test_a_name_and_a_class_that_no_module_has_together():
    d = found("KT301", check(deepseek_like(3), rule(r"self_attn$", "torch.nn.Linear")))
    assert "none of which is a torch.nn.Linear" in d.message
    assert "model.layers.*.self_attn (3 modules)" in d.message


def test_a_selector_that_takes_nothing_names_what_is_near():
    d = found("KT301", check(deepseek_like(5), rule(selector=selector("@model.layers.*.mlp.expert | class=Linaer"))))
    assert "no path has expert; did you mean experts?" in d.help
    assert "did you mean Linear?" in d.help


def test_a_literal_backslash_is_the_reason_that_is_given():
    diagnostics = check(deepseek_like(3), rule(r"^model\\.layers\\.(?!.*self_attn\\.kv_b_proj).*$", "torch.nn.Linear"))
    assert codes(diagnostics) == ["KT308"]
    assert diagnostics[0].span.start.line == 2


def test_a_rule_below_one_that_takes_all_of_its_modules_is_unreachable():
    d = found("KT302", check(LAYERS, rule(r"^model\.layers\..*$"), rule(r"^model\.layers\.3\.proj$")))
    assert d.message == "rule 2 is unreachable: every module it matches is already taken by rule 1 (line 1)"
    assert (d.span.start.line, d.help) == (11, "move rule 2 above rule 1 (line 1)")
    assert [r.origin.span.start.line for r in d.related] == [2]


def test_a_rule_inside_what_a_later_rule_closes_is_unreachable():
    graph = make_graph([Row("mlp.experts", LIST), Row("mlp.experts.0.up", LINEAR)])
    d = found("KT302", check(graph, rule(cls="torch.nn.Linear"), rule("experts$", recursive=False)))
    assert "`recursive: false` of rule 2" in d.message


def test_a_rule_that_shares_a_module_by_its_aliases_is_not_unreachable():
    cls = f"{OLD_V3}DeepseekV3RotaryEmbedding"
    rules = rule(r"layers\.[0-2]\.", cls, generate_device="cuda:0"), rule(r"layers\.[3-5]\.", cls, generate_device="cuda:1")
    assert codes(check(deepseek_like(6), *rules)) == []


def test_partly_shadowed_rules_are_only_mentioned():
    diagnostics = check(LAYERS, rule(r"^model\.layers\.3\."), rule(r"^model\.layers\."))
    assert codes(diagnostics) == ["KT303"]
    assert diagnostics[0].message == "rule 2 matches 48 modules and decides 47: 1 is taken by rule 1 (line 1)"
    assert diagnostics[0].severity == "info"


def test_two_rules_for_different_machines_do_not_shadow_each_other():
    new, old = selector("hw.cuda_sm >= 80"), selector("hw.cuda_sm < 80")
    rules = rule("proj$", when=new), rule("proj$", when=old)
    assert codes(check(LAYERS, *rules)) == []
    gpu = Hardware("one", (Device("cuda:0", 1, sm=90),))
    assert codes(check(LAYERS, *rules, hardware=gpu)) == []
    assert codes(check(LAYERS, rule("proj$", when=new), rule("proj$", when=new))) == ["KT302"]


def test_an_inactive_rule_is_not_blamed_for_matching_nothing():
    gpu = Hardware("one", (Device("cuda:0", 1, sm=75),))
    assert codes(check(LAYERS, rule("nowhere", when=selector("hw.cuda_sm >= 80")), hardware=gpu)) == []


def test_an_open_number_takes_more_layers():
    d = found("KT305", check(LAYERS, rule(r"^model\.layers\.1")))
    assert "also takes layers 10-19 beside 1:" in d.message
    assert d.help == r"write `1\.` so that the number ends there"
    assert d.severity == "warning"


@pytest.mark.parametrize(
    "name", [r"^model\.layers\.1\.", r"^model\.layers\.[0-9]+\.proj", r"layers\.\d", r"layers\.(1|2)\.", r"\.layers\."]
)
def test_a_closed_number_or_all_layers_are_not_an_open_number(name):
    assert "KT305" not in codes(check(LAYERS, rule(name)))


def test_any_number_is_not_an_open_number_where_some_layers_lack_the_module():
    assert "KT305" not in codes(check(deepseek_like(12), rule(r"^model\.layers\.\d+\.mlp\.experts$")))


def test_layers_beyond_the_model_are_an_error_where_they_are_spelt_out():
    assert "layers 30-39" in found("KT306", check(LAYERS, rule(r"^model\.layers\.(3[0-9])\."))).message
    d = found("KT306", check(LAYERS, rule(r"^model\.layers\.(1[5-9]|2[0-9]|30)\."), rule(r"^model\.layers\.")))
    assert "names layer 30, and tiny has layers 0-23" in d.message
    assert "layer 60" in found("KT306", check(LAYERS, rule(selector=selector("layer in 12..60 & class=Linear")))).message
    assert "layer 60" in found("KT306", check(LAYERS, rule(selector=selector("@model.layers.{12..60}.proj")))).message


@pytest.mark.parametrize("name", [r"^model\.layers\.(1[5-9]|2[0-9])\.", r"^model\.layers\.([2-6][0-9])\."])
def test_a_digit_class_that_reaches_past_the_end_is_not(name):
    assert "KT306" not in codes(check(LAYERS, rule(name), rule(r"\.layers\.")))


def test_an_expected_number_of_modules():
    d = found("KT307", check(LAYERS, rule("proj$", expect=23)))
    assert "was to take 23 modules and takes 24: model.layers.*.proj (24 modules)" in d.message
    assert d.span.start.line == 5
    assert codes(check(LAYERS, rule("proj$", expect=24))) == []


def test_layers_that_no_rule_covers_beside_ones_that_are():
    d = found("KT309", check(LAYERS, rule(r"^model\.layers\.([5-9]|1[0-9])\.", "torch.nn.Linear")))
    assert d.message == "layers 0-4, 20-23 are covered by no rule while 5-19 are (proj)"
    assert d.severity == "warning"


def test_two_digits_where_numbers_have_one_are_an_error():
    d = found("KT309", check(LAYERS, rule(r"^model\.layers\.([0-2][0-9])\.", "torch.nn.Linear")))
    assert d.severity == "error"
    assert d.help == "write ([0-9]|1[0-9]|2[0-3]) for [0-2][0-9]"


def test_an_operator_that_does_not_fit_the_module():
    linear = spec("OnlyLinear", "linear", refuses=lambda m, c: "too small" if m.parameters[0].shape[0] < 4 else None)
    graph = make_graph([Row("a", LINEAR, weight(4, 4)), Row("b", LINEAR, weight(2, 2)), Row("c", EMBEDDING, weight(9, 9))])
    messages = [d.message for d in check(graph, rule("^[abc]$", operator=linear)) if d.code == "KT407"]
    assert len(messages) == 2
    assert any("b: too small" in m for m in messages)
    assert any("it replaces linear modules, and this is a Embedding (embedding)" in m for m in messages)


def test_one_layer_on_two_gpus_is_an_error_and_experts_on_the_cpu_are_not():
    graph = deepseek_like(4, dense=0)
    linears = rule(r"^model\.layers\.", "torch.nn.Linear", generate_device="cuda:1")
    experts = rule(r"experts$", recursive=False, generate_device="cpu")
    d = found("KT502", check(graph, linears, experts, rule(r"^model\.layers\.", generate_device="cuda:0")))
    assert d.span.start.line == 24
    assert "each of layers 0-3 is split over cuda:0 and cuda:1" in d.message
    assert "rule 1 puts the rest on cuda:1" in d.message
    assert codes(check(graph, linears, experts, rule(r"^model\.layers\.", generate_device="cuda:1")), "error") == []


def test_a_transfer_map_that_says_otherwise_than_the_devices():
    graph = deepseek_like(4)
    model = spec("Model", "model")
    low, high = rule(r"layers\.[01]\.", generate_device="cuda:0"), rule(r"layers\.[23]\.", generate_device="cuda:1")
    d = found("KT503", check(graph, low, high, rule("^model$", operator=model, transfer_map={3: "cuda:1"})))
    assert "transfer_map is {3: cuda:1}, and by the rules layers change device at 2: cuda:1" in d.message
    assert d.span.start.line == 24
    assert "KT503" not in codes(check(graph, low, high, rule("^model$", operator=model, transfer_map={2: "cuda:1"})))


def test_a_transfer_map_without_devices_in_the_rules():
    d = found("KT503", check(deepseek_like(4), rule("^model$", operator=spec("Model", "model"), transfer_map={2: "cuda:1"})))
    assert "are all on cuda:0" in d.message


def test_older_paths_of_one_module_must_get_one_operator():
    cls = f"{OLD_V3}DeepseekV3RotaryEmbedding"
    one, two = spec("One", "rotary"), spec("Two", "rotary")
    low, high = r"layers\.[0-2]\.", r"layers\.[3-5]\."
    d = found("KT505", check(deepseek_like(6), rule(low, cls, one), rule(high, cls, two)))
    assert "give it One and Two" in d.message
    d = found(
        "KT505", check(deepseek_like(6), rule(low, cls, one, generate_op="Plain"), rule(high, cls, one, generate_op="Packed"))
    )
    assert "generate_op Plain and Packed" in d.message


def test_kv_b_proj_under_absorbed_attention():
    graph = deepseek_like(4)
    linear, attention = spec("Lin", "linear"), spec("Attn", "attention")
    takes = rule(r"^model\.layers\..*$", "torch.nn.Linear", linear, generate_op="Packed")
    absorbs = rule(r"self_attn$", operator=attention)
    d = found("KT601", check(graph, takes, absorbs))
    assert d.severity == "warning"
    assert d.span.start.line == 2
    assert (
        "rule 1 takes model.layers.*.self_attn.kv_b_proj (4 modules); Attn (rule 2) then works on the numbers that Packed makes"
        in d.message
    )
    plain = rule(r"^model\.layers\..*$", "torch.nn.Linear", linear, generate_op="Plain")
    assert found("KT601", check(graph, plain, absorbs)).severity == "info"
    assert "KT601" not in codes(check(graph, takes))


def test_experts_need_a_block_that_can_call_them():
    experts, block = (
        rule(r"experts$", operator=spec("Ex", "experts"), recursive=False),
        rule(r"mlp$", f"{V3}MoE", spec("Moe", "moe")),
    )
    old = deepseek_like(3, dense=1, experts=2)
    assert "DeepseekV3MoE calls its experts one by one" in found("KT602", check(old, experts)).message
    assert "KT602" not in codes(check(old, experts, block))
    assert "KT602" not in codes(check(deepseek_like(3, dense=1), experts))


def test_modules_left_on_the_default_device():
    graph = deepseek_like(3, dense=3)
    linears = rule(r"^model\.layers\.", "torch.nn.Linear", generate_device="npu:0")
    d = found("KT603", check(graph, linears))
    assert d.severity == "warning"
    assert "they stay on cuda:0 while the rest is on npu:0" in d.message
    assert "KT603" not in codes(check(graph, rule(r"^model\.layers\.", "torch.nn.Linear", generate_device="cuda:0")))


def test_places_of_a_native_file_are_devices_of_what_no_rule_names():
    graph = deepseek_like(4, dense=4)
    places = [Place("cuda:0", selector("layer in 0..1"), origin(90)), Place("cuda:1", selector("layer in 1.."), origin(91))]
    report = Report()
    matches = match(rule_set(rule("o_proj$"), form="native", default_device="cpu", places=places), graph, None, report)
    device = {m.path: matches.device(m.index) for m in graph}
    assert device["model.layers.1.self_attn.o_proj"] == "cuda:0"
    assert device["model.layers.2.self_attn.o_proj"] == "cuda:1"
    assert device["model.layers.3.input_layernorm"] == "cuda:1"
    assert device["lm_head"] == "cpu"
    check_selection(matches, report)
    assert codes(report, "error", "warning") == []
    assert "which place cuda:0 (line 90) places" in found("KT303", report).message


MODELS = {
    "DeepSeek-V2-Lite": "deepseek-v2-lite", "DeepSeek-V2": "deepseek-v2", "DeepSeek-V3": "deepseek-v3", "Mixtral": "mixtral-8x7b",
    "Internlm": "internlm2.5-7b-1m", "Moonlight": "moonlight-16b-a3b", "Qwen2": "qwen2-57b-a14b", "Qwen3": "qwen3-30b-a3b",
}  # fmt: skip
DEAD = {
    "Qwen3Moe-serve.yaml": [("KT301", 90)],
    "Qwen3Moe-serve-amx.yaml": [("KT301", 91)],
    "npu/DeepSeek-V3-Chat-300IA2-npu-serve.yaml": [("KT301", 80)],
    "npu/Qwen3-Chat-300IA2-npu-serve.yaml": [("KT302", 31)],
}
"""Rules that take nothing: of a class that only closed experts had, of an operator's class, or below a double of theirs."""

BAD = {
    "02-single-quoted-double-backslash.yaml": [("KT308", 4)],
    "04-shadowed-by-broad-default.yaml": [("KT302", 10)],
    "05-two-digit-class-misses-0-to-9.yaml": [("KT309", 4)],
    "07-one-layer-on-two-gpus.yaml": [("KT502", 28)],
    "12-recursive-misplaced.yaml": [("KT204", 7)],
    "15-kv-b-proj-quantized.yaml": [],
}
UPSTREAM = sorted(str(f.relative_to(CASES / "upstream_rules")) for f in (CASES / "upstream_rules").rglob("*.yaml"))
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the shared test cases are not here")


def errors_of(path, model):
    from ktopt.compiler import check as check_file

    return [(d.code, d.span.start.line) for d in check_file(path, model) if d.severity == "error"]


@needs_cases
@pytest.mark.parametrize("name", UPSTREAM)
def test_a_real_file_is_blamed_only_for_its_dead_rules(name):
    model = next(model for prefix, model in MODELS.items() if Path(name).name.startswith(prefix))
    errors = [(code, line) for code, line in errors_of(CASES / "upstream_rules" / name, model) if not code.startswith("KT4")]
    assert errors == DEAD.get(name, [])


@needs_cases
@pytest.mark.parametrize("name", BAD)
def test_a_wrong_file_is_blamed_at_the_line_that_is_wrong(name):
    assert errors_of(CASES / "bad_rules" / name, "deepseek-v3") == BAD[name]


def coded(code, report):
    return [d for d in report if d.code == code]


@needs_cases
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("DeepSeek-V3-Chat", "KDeepseekV2Attention", "KQwen3MoeAttention"),
        ("DeepSeek-V3-Chat", "KDeepseekV2Model", "KLlamaModel"),
        ("DeepSeek-V3-Chat", "KDeepseekV2Model", "KQwen2MoeModel"),
        ("DeepSeek-V3-Chat", "KDeepseekV3MoE", "KQwen3MoeSparseMoeBlock"),
    ],
)
def test_an_operator_of_another_family_is_a_warning_that_names_the_right_one(name, right, wrong):
    text = (CASES / f"upstream_rules/{name}.yaml").read_text().replace(f".{right}", f".{wrong}").replace("absorb_for_prefill", "# ")
    report = run_stages(SourceFile("r.yaml", text), "deepseek-v3", plan=False).report
    (one,) = coded("KT407", report)
    assert (str(one.severity), f"write {right}" in one.help) == ("warning", True)


@needs_cases
def test_a_quantised_kv_b_proj_is_a_warning_and_leaves_a_plan_that_applies():
    path = CASES / "bad_rules/15-kv-b-proj-quantized.yaml"
    compilation = run_stages(str(path), "deepseek-v3")
    (warning,) = coded("KT601", compilation.report)
    assert (str(warning.severity), warning.span.start.line) == ("warning", 4)
    assert "KDeepseekV2Attention (rule 2) then works on the numbers that KLinearMarlin makes of it" in warning.message
    assert compilation.plan is not None
    assert not compilation.plan.errors


@pytest.mark.parametrize(
    ("match", "help", "without"),
    [
        (
            "{class: torch.nn.Linear}",
            "give the rule a name too, such as",
            r'{name: "^(?!.*self_attn\\.kv_b_proj)", class: torch.nn.Linear}',
        ),
        ('{name: "layers"}', "to the pattern", r'{name: "^(?!.*self_attn\\.kv_b_proj).*proj$"}'),
        ('"class=Linear"', "to the selector", '"class=Linear - @model.layers.*.self_attn.kv_b_proj"'),
    ],
)
def test_how_to_leave_kv_b_proj_out_is_said_in_the_rule_s_own_way(match, help, without):
    rules = """
        version: 1
        place: {{cuda: "@**"}}
        rules:
          - {{match: "@model.layers.*.self_attn", replace: KDeepseekV2Attention}}
          - {{match: {match}, replace: KTransformersLinear, kwargs: {{generate_op: KLinearMarlin}}}}
    """

    def warnings(match):
        return coded("KT601", run_stages(SourceFile("r.yaml", rules.format(match=match)), "deepseek-v3", plan=False).report)

    (warning,) = warnings(match)
    assert help in warning.help
    assert not warnings(without)


@needs_cases
def test_attention_of_another_family_is_not_said_to_absorb():
    text = (CASES / "bad_rules/15-kv-b-proj-quantized.yaml").read_text()
    assert coded("KT601", run_stages(SourceFile("r.yaml", text), "deepseek-v3", plan=False).report)
    text = text.replace("KDeepseekV2Attention", "KQwen3MoeAttention").replace("absorb_for_prefill", "# ")
    assert not coded("KT601", run_stages(SourceFile("r.yaml", text), "deepseek-v3", plan=False).report)


@pytest.mark.parametrize(
    ("said", "good"),
    [("LlamaForCausalLM", True), ("llama", True), ("LLamaForCausalLM", False), ("LamaForCausalLM", False)],
)
def test_architectures_are_spelt_as_the_model_spells_them(said, good):
    text = f"version: 1\narchitectures: [{said}]\nplace: {{cpu: '@**'}}\nrules: []\n"
    wrong = coded("KT311", run_stages(SourceFile("r.yaml", text), "smollm2-135m").report)
    assert [d.help for d in wrong] == [] if good else ["did you mean LlamaForCausalLM?"]
