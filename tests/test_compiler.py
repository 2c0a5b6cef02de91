"""The stages together: what options change, and how far a compilation gets."""

from pathlib import Path

import pytest

import ktopt
from ktopt.compiler import run_stages
from ktopt.diagnostics import CompileError, UsageError
from ktopt.hardware import load_hardware
from ktopt.plan import Plan, Step
from ktopt.source import SourceFile

LINEARS = """\
- match: {class: torch.nn.Linear}
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs: {generate_device: cuda, prefill_device: cuda, generate_op: KLinearMarlin, prefill_op: KLinearTorch}
"""
EXPERTS = """\
- match: {name: '\\.experts$'}
  replace: {class: ktransformers.operators.experts.KTransformersExperts}
  recursive: False
"""


def compiled(text: str, model: str, **options: object) -> Plan:
    return ktopt.compile(SourceFile("rules.yaml", text), model, **options)


def row(plan: Plan, path: str) -> Step:
    return plan.by_path[path]


def test_list_files_default_to_the_first_gpu_and_native_ones_to_the_cpu() -> None:
    assert row(compiled(LINEARS, "smollm2-135m"), "model.norm").generate_device == "cuda:0"
    assert row(compiled("version: 1\nrules: []\n", "smollm2-135m"), "model.norm").generate_device == "cpu"


def test_the_device_option_moves_what_nothing_places_and_nothing_else() -> None:
    plan = compiled(LINEARS, "smollm2-135m", device="cuda:1")
    assert row(plan, "model.norm").generate_device == "cuda:1"
    assert row(plan, "model.layers.0.mlp.up_proj").generate_device == "cuda:0"


def test_checks_know_of_the_device_option() -> None:
    source = SourceFile("rules.yaml", LINEARS.replace("cuda,", "cuda:1,"))
    assert "KT603" in {d.code for d in ktopt.check(source, "smollm2-135m")}
    assert "KT603" not in {d.code for d in ktopt.check(source, "smollm2-135m", device="cuda:1")}


PREFILL = "prefill runs by the generate op on the generate device in this version"


def test_a_plan_says_once_that_prefill_runs_where_decoding_does_if_a_rule_wants_it_elsewhere() -> None:
    assert compiled(LINEARS.replace("prefill_op: KLinearTorch", "prefill_op: KLinearMarlin"), "smollm2-135m").notes == ()
    assert compiled(LINEARS, "smollm2-135m").notes == (PREFILL,)
    assert compiled(LINEARS.replace("prefill_device: cuda", "prefill_device: cpu"), "smollm2-135m").notes == (PREFILL,)


def test_a_prefill_device_beside_a_generate_device_from_elsewhere_is_compared_once_there_is_a_plan() -> None:
    source = SourceFile(
        "rules.yaml", "- match: {class: torch.nn.Linear}\n  replace: {class: KTransformersLinear, kwargs: {prefill_device: cpu}}\n"
    )
    found = [d for d in ktopt.check(source, "smollm2-135m") if d.code == "KT408"]
    assert [(str(d.severity), d.span.start.line, d.message.endswith("in this version, cuda:0")) for d in found] == [
        ("info", 2, True)
    ]
    assert [d for d in ktopt.check(source, "smollm2-135m", device="cpu") if d.code == "KT408"] == []


def test_experts_that_no_rule_places_live_on_the_cpu_as_upstream() -> None:
    step = row(compiled(EXPERTS, "mixtral-8x7b"), "model.layers.0.mlp.experts")
    assert (step.generate_device, step.prefill_device) == ("cpu", "cuda:0")


def test_what_lies_below_a_closed_module_is_that_modules() -> None:
    step = row(compiled(EXPERTS, "mixtral-8x7b"), "model.layers.0.mlp.experts.act_fn")
    assert (step.inside, step.rule) == ("model.layers.0.mlp.experts", None)


def test_remapping_moves_devices_and_gives_ops_their_counterparts() -> None:
    plan = compiled(LINEARS, "smollm2-135m", remap={"cuda": "cpu"})
    step = row(plan, "model.layers.0.mlp.up_proj")
    assert plan.devices == ("cpu",)
    assert step.kwargs["generate_device"] == "cpu"
    assert step.kwargs["generate_op"] == "KLinearMarlin"
    assert step.runs["KLinearMarlin"][0] == "KLinearCPUInfer"
    assert any("gives way" in note for note in step.notes)


def test_an_exact_remapping_wins_over_its_kind() -> None:
    plan = compiled(LINEARS, "smollm2-135m", remap={"cuda": "cpu", "cuda:0": "cuda:3"})
    assert row(plan, "model.layers.0.mlp.up_proj").generate_device == "cuda:3"


def test_an_op_that_nobody_asked_for_is_one_that_runs_there() -> None:
    text = "version: 1\nrules: [{match: '@lm_head', replace: KTransformersLinear}]\n"
    for device, op in (("cpu", "KLinearCPUInfer"), ("cuda", "KLinearMarlin"), ("npu", "KLinearTorch")):
        step = row(compiled(text, "llama-3.1-8b", device=device), "lm_head")
        assert step.kwargs["generate_op"] == op
        assert not step.runs


def test_a_tied_head_on_the_embeddings_device_costs_nothing() -> None:
    plan = compiled("version: 1\nrules: []\n", "smollm2-135m")
    assert row(plan, "lm_head").weight_bytes == 0
    moved = compiled("version: 1\nplace: {'cuda:0': '@lm_head'}\nrules: []\n", "smollm2-135m")
    assert row(moved, "lm_head").weight_bytes == 49152 * 576 * 2


def test_bytes_follow_the_dtype() -> None:
    text = "version: 1\nrules: []\n"
    half, full = (compiled(text, "llama-3.1-8b", dtype=d).weight_bytes for d in ("bfloat16", "float32"))
    assert full == pytest.approx(2 * half, rel=1e-6)


def test_a_machine_without_the_device_is_an_error_at_the_rule() -> None:
    report = ktopt.check(SourceFile("r.yaml", LINEARS), "smollm2-135m", hardware=load_hardware("cpu"))
    found = [d for d in report.errors if d.code == "KT501"]
    assert found
    assert "cuda:0" in found[0].message


def test_a_machine_that_is_too_small_is_an_error_that_names_the_largest_modules() -> None:
    report = ktopt.check(SourceFile("r.yaml", LINEARS), "llama-3.1-70b", hardware=load_hardware("1x24GB"))
    found = [d for d in report.errors if d.code == "KT504"]
    assert len(found) == 1
    assert "the largest are model.layers.*.mlp.gate_proj 10.57 GB, model.layers.*.mlp.up_proj 10.57 GB" in (found[0].help or "")


def test_what_is_too_much_is_said_once() -> None:
    whole = SourceFile("r.yaml", "version: 1\nplace: {'cuda:0': '@**'}\nrules: []\n")
    auto = SourceFile("r.yaml", "version: 1\nplace: auto\nrules: []\n")
    for source, code in ((whole, "KT507"), (auto, "KT506")):
        report = ktopt.check(source, "llama-3.1-70b", hardware="1x24GB+32GB", context=2048)
        assert [d.code for d in report.errors] == [code]


def test_errors_that_leave_a_plan_standing_are_in_the_plan() -> None:
    text = LINEARS + "- match: {name: nowhere}\n  replace: {class: default, kwargs: {generate_device: cpu}}\n"
    plan = compiled(text, "smollm2-135m")
    assert len(plan.errors) == 1
    assert "KT301" in plan.errors[0]


def test_errors_that_stop_a_plan_are_raised_with_all_findings() -> None:
    with pytest.raises(CompileError) as caught:
        compiled(LINEARS.replace("KLinearMarlin", "KLinearMarlim"), "smollm2-135m")
    assert [d.code for d in caught.value.report.errors] == ["KT402"]


def test_without_a_model_the_stages_stop_after_validation() -> None:
    compilation = run_stages(SourceFile("r.yaml", LINEARS))
    assert compilation.ruleset is not None
    assert compilation.graph is None


@pytest.mark.parametrize("options", [{"device": "gpu"}, {"dtype": "int3"}, {"remap": {"cuda": "tpu"}}])
def test_options_that_are_none_are_a_usage_error(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        run_stages(SourceFile("r.yaml", LINEARS), "smollm2-135m", **options)  # type: ignore[arg-type]


def test_compiling_twice_gives_equal_plans(tmp_path: Path) -> None:
    assert compiled(EXPERTS + LINEARS, "mixtral-8x7b") == compiled(EXPERTS + LINEARS, "mixtral-8x7b")


@pytest.mark.parametrize(("device", "notes"), [("cpu", ("shares its weight with model.embed_tokens",)), ("cuda:1", ())])
def test_a_head_that_its_class_ties_costs_nothing_beside_the_embedding(device: str, notes: tuple[str, ...]) -> None:
    text = f'version: 1\nrules:\n  - match: "@lm_head"\n    replace: default\n    kwargs: {{generate_device: "{device}"}}\n'
    plan = compiled(text, "gemma-3-270m")
    step = row(plan, "lm_head")
    assert step.notes == notes
    assert step.weight_bytes == (0 if notes else 2 * 262_144 * 640)
    held = sum(s.weight_bytes for s in plan.steps if not s.path.endswith("rotary_emb") and s.path != "lm_head")
    assert held >= 2 * 268_098_176


def test_experts_that_upstream_keeps_on_the_cpu_split_no_layer() -> None:
    rest = "- match: {name: '^model.layers.'}\n  replace: {class: default, kwargs: {generate_device: 'cuda:1'}}\n"
    report = ktopt.check(SourceFile("r.yaml", EXPERTS + rest), "mixtral-8x7b")
    assert [d.code for d in report.errors] == []


def test_a_file_that_moves_only_the_experts_leaves_nothing_behind() -> None:
    report = ktopt.check(SourceFile("r.yaml", EXPERTS), "mixtral-8x7b")
    assert "KT603" not in {d.code for d in report}


def test_an_op_that_can_not_run_in_its_place_is_an_error_without_a_remapping() -> None:
    rule = "{match: '@lm_head', replace: KTransformersLinear, kwargs: {generate_op: KLinearMarlin}}"
    text = f"version: 1\nplace: {{cpu: '@**'}}\nrules: [{rule}]\n"
    found = [d for d in ktopt.check(SourceFile("r.yaml", text), "llama-3.1-8b") if d.code == "KT406"]
    assert [(d.severity, d.span.start.line) for d in found] == [("error", 3)]
    moved = text.replace("{cpu:", "{'cuda:0':")
    assert compiled(moved, "llama-3.1-8b", remap={"cuda": "cpu"}).errors == ()
