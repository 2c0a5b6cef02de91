"""`ktopt place` and `place: auto`: pins stay, what belongs together stays together, and what is said is what a plan has."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from builders import Row, make_graph
from placed_plans import assert_holds_what_was_said

import ktopt
from ktopt.cli import main
from ktopt.compiler import run_stages
from ktopt.diagnostics import KtoptError, Report
from ktopt.hardware import load_hardware
from ktopt.parse import parse
from ktopt.placing.caches import caches_of
from ktopt.placing.place import NothingFits, Placing, place
from ktopt.plan import Plan
from ktopt.plan_options import PlanOptions
from ktopt.source import SourceFile
from ktopt.trees import load_tree
from ktopt.validate import validate
from ktopt.working_memory import working_memory

EXPERTS = (
    'version: 1\nrules:\n  - {match: "@model.layers.*.mlp.experts", replace: KTransformersExperts, '
    "kwargs: {generate_op: KExpertsTorch}}\n"
)
NOTHING = "version: 1\nrules: []\n"
PINNED = "version: 1\nplace: {'cuda:7': '@lm_head | layer in 20..21'}\nrules: []\n"
DEEPSEEK = """\
version: 1
rules:
  - {match: "@model.layers.*.self_attn", replace: KDeepseekV2Attention, kwargs: {absorb_for_prefill: true, chunk_size: 512}}
  - {match: "@model.layers.*.mlp.experts", replace: KTransformersExperts, kwargs: {generate_op: KExpertsCPU}}
"""


def placed(rules: str, model: str, machine: str, context: int = 4096) -> Placing:
    hardware = load_hardware(machine)
    ruleset = validate(parse(SourceFile("r.yaml", rules), report := Report()), report)
    assert ruleset is not None
    return place(ruleset, load_tree(model), hardware, PlanOptions(hardware=hardware), None, context)


def filed(rules: str, model: str, machine: str, folder: Path, context: int = 4096) -> tuple[str, Plan]:
    """What `ktopt place -o` writes, and its plan."""
    before, after = folder / "before.yaml", folder / "after.yaml"
    before.write_text(rules)
    arguments = ["--model", model, "--hardware", machine, "--context", str(context), "-o", str(after)]
    assert main(["place", str(before), *arguments]) == 0
    return after.read_text(), ktopt.compile(after, model, hardware=machine)


def devices(plan: Plan) -> dict[str, str]:
    return {step.path: step.generate_device for step in plan.steps if step.weight_bytes}


@pytest.mark.parametrize(
    ("rules", "model", "machine"),
    [
        (EXPERTS, "qwen3-30b-a3b", "2x3090+64GB"),
        (NOTHING, "llama-3.1-70b", "2x24GB+128GB"),
        (DEEPSEEK, "deepseek-v3", "1x24GB+2TB"),
        (NOTHING, "gemma-3-270m", "1x3060-12GB+16GB"),
        (NOTHING, "qwen3-next-80b-a3b", "4xA100-80+256GB"),
        (NOTHING, "moonlight-16b-a3b", "1x4GB+64GB"),
    ],
)
def test_a_plan_by_the_written_map_holds_on_each_device_what_was_said(rules: str, model: str, machine: str, tmp_path: Path) -> None:
    placing = placed(rules, model, machine)
    _, plan = filed(rules, model, machine, tmp_path)
    assert not plan.errors
    assert_holds_what_was_said(placing, plan, 4096)
    assert placing.proved
    assert not ktopt.memory(plan, 4096, hardware=machine).over


def test_modules_of_a_layer_stay_together_but_for_its_experts(tmp_path: Path) -> None:
    _, plan = filed(EXPERTS, "deepseek-v2-lite", "2x3060-12GB+64GB", tmp_path)
    by_layer: dict[str, set[str]] = {}
    for path, device in devices(plan).items():
        if path.startswith("model.layers.") and ".experts" not in path:
            by_layer.setdefault(path.split(".")[2], set()).add(device)
    assert len(by_layer) == 27
    assert all(len(found) == 1 for found in by_layer.values())
    assert {next(iter(found)) for found in by_layer.values()} == {"cuda:0", "cuda:1"}


def test_lines_and_kwargs_of_the_file_stay_as_they_are(tmp_path: Path) -> None:
    rules = (
        "version: 1\nplace:\n  # the head is wanted here\n  'cuda:1': '@lm_head'\n  cpu: layer in 0..1\nrules:\n"
        "  - {match: '@model.layers.5.self_attn', replace: default, kwargs: {generate_device: cpu}}\n"
        "  - {match: '@model.layers.5.self_attn.*', replace: default, kwargs: {generate_device: cpu}}\n"
    )
    text, plan = filed(rules, "qwen3-30b-a3b", "2x3090+64GB", tmp_path)
    assert "  # the head is wanted here\n" in text
    assert list(yaml.safe_load(text)["place"]) == ["cuda:1", "cpu", "cuda:0"]
    where = devices(plan)
    assert where["lm_head"] == "cuda:1"
    assert {device for path, device in where.items() if path.startswith(("model.layers.0.", "model.layers.1."))} == {"cpu"}
    assert {device for path, device in where.items() if path.startswith("model.layers.5.") and "experts" not in path} == {"cpu"}
    assert where["model.layers.20.self_attn.q_proj"] != "cpu"


def test_experts_whose_op_runs_on_the_cpu_alone_are_left_there() -> None:
    placing = placed(DEEPSEEK, "deepseek-v3", "1xA100-80+2TB")
    assert {line.device: line.text for line in placing.lines} == {
        "cpu": "@model.layers.{3..60}.mlp.experts",
        "cuda:0": "@**",
    }


def test_place_auto_makes_the_plan_of_the_map_that_ktopt_place_writes(tmp_path: Path) -> None:
    _, plan = filed(EXPERTS, "qwen3-30b-a3b", "2x3090+64GB", tmp_path)
    auto = SourceFile("auto.yaml", EXPERTS.replace("rules:", "place: auto\nrules:"))
    made = ktopt.compile(auto, "qwen3-30b-a3b", hardware="2x3090+64GB", context=4096)
    assert devices(made) == devices(plan)
    assert made.transfers == plan.transfers


def test_a_map_that_is_placed_again_stays_as_it_is(tmp_path: Path) -> None:
    text, _ = filed(EXPERTS, "qwen3-30b-a3b", "2x3090+64GB", tmp_path)
    again, _ = filed(text, "qwen3-30b-a3b", "2x3090+64GB", tmp_path)
    assert again == text


def test_a_file_that_places_all_is_said_to_and_is_placed_anew_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before.yaml", tmp_path / "after.yaml"
    before.write_text("version: 1\n# where\nplace:\n  cpu: '@model.layers.**'  # all\n  'cuda:0': '@**'\n# what\nrules: []\n")
    place = ["place", str(before), "--model", "smollm2-135m", "--hardware", "1x24GB+64GB"]
    assert main(place) == 0
    assert "the file says of every module where it goes, and that stays: --anew" in capsys.readouterr().out
    assert main([*place, "--anew", "-o", str(after)]) == 0
    assert "--anew" not in capsys.readouterr().out
    assert after.read_text() == 'version: 1\n# where\nplace:\n  "cuda:0": "@**"\n# what\nrules: []\n'


@pytest.mark.parametrize(
    ("rules", "help"),
    [
        ("version: 1\nplace: {cpu: '@**'}\nrules: []\n", "what `place:` says stays: `ktopt place --anew` leaves its lines out"),
        (DEEPSEEK, "an op that a rule names keeps its modules where it runs: without `generate_op` the best one for each device"),
    ],
)
def test_what_keeps_modules_where_nothing_fits_is_said(rules: str, help: str) -> None:
    with pytest.raises(NothingFits) as caught:
        placed(rules, "deepseek-v3", "8x80GB+512GB")
    said = [part for part in caught.value.help.split("; ") if "--anew" in part or "generate_op" in part]
    assert [part.startswith(help) for part in said] == [True]


def test_place_auto_needs_a_machine_and_a_check_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "auto.yaml"
    rules.write_text(EXPERTS.replace("rules:", "place: auto\nrules:"))
    assert main(["check", str(rules), "--model", "qwen3-30b-a3b"]) == 0
    assert main(["plan", str(rules), "--model", "qwen3-30b-a3b"]) == 1
    assert "place: auto" in capsys.readouterr().err


def test_a_check_without_a_machine_says_nothing_of_what_is_yet_to_be_placed() -> None:
    rules = (
        "version: 1\nplace: auto\nrules:\n"
        '  - {match: "@model.layers.*.self_attn", replace: KDeepseekV2Attention, kwargs: {generate_device: "cuda:0"}}\n'
        '  - {match: "@model.layers.*.mlp", replace: default}\n'
    )
    assert [str(d) for d in ktopt.check(SourceFile("auto.yaml", rules), "deepseek-v2-lite")] == []


def test_where_nothing_fits_it_is_said_by_how_much_and_what_would_help() -> None:
    with pytest.raises(NothingFits) as caught:
        placed(EXPERTS, "qwen3-30b-a3b", "1x3090+16GB")
    assert "take 61.47 GB at least, and there is cpu 15.73 GB, cuda:0 24.96 GB" in caught.value.message
    assert "the largest items are model.layers.*.mlp.experts 57.98 GB" in caught.value.help
    assert "of main memory it fits" in caught.value.help
    with pytest.raises(NothingFits, match=r"a context of \d+,\d+ tokens fits"):
        placed(NOTHING, "llama-3.1-8b", "cpu+40GB", context=262_144)
    with pytest.raises(NothingFits, match=r"there is cpu 14\.21 GB, cuda:0 to cuda:7 4\.56 GB each\n"):
        placed(NOTHING, "deepseek-v3", "8x5GB+16GB")
    with pytest.raises(NothingFits, match=r"what the file pins to cpu takes \d+\.\d+ GB"):
        placed(DEEPSEEK, "deepseek-v3", "1x24GB+512GB")


def test_place_auto_where_nothing_fits_is_a_finding_at_its_line() -> None:
    auto = SourceFile("auto.yaml", EXPERTS.replace("rules:", "place: auto\nrules:"))
    report = run_stages(auto, "qwen3-30b-a3b", hardware=load_hardware("1x3090+16GB")).report
    found = next(d for d in report.errors if d.code == "KT506")
    assert (found.span.start.line, "nothing fits on 1x3090+16GB" in found.message) == (2, True)


@pytest.mark.parametrize(
    ("rules", "machine", "message"),
    [
        ("- match: {name: a}\n  replace: {class: default}\n", "1x24GB", "ktopt migrate turns it into the native form"),
        (
            "version: 1\nplace: {'cuda:3': '@lm_head'}\n",
            "1x24GB",
            "lm_head is put on cuda:3 by the file, and 1x24GB has cpu, cuda:0",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(
    rules: str, machine: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(rules)
    assert main(["place", str(path), "--model", "smollm2-135m", "--hardware", machine]) == 1
    assert message in capsys.readouterr().err


def test_a_map_for_rules_with_errors_is_no_success_and_a_plan_is_no_rule_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("version: 1\nrules:\n  - {match: class=Linear, replace: KTransformersLinear, expect: 3}\n")
    target = ["--model", "smollm2-135m", "--hardware", "cpu+8GB"]
    assert main(["place", str(path), *target]) == 1
    assert "KT307" in capsys.readouterr().err
    assert main(["place", "plan.json", *target]) == 2
    assert "a plan has its places already" in capsys.readouterr().err


def test_what_a_machine_does_not_say_of_its_speed_is_said_to_be_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", "rules/smollm2/reference.yaml", "--model", "smollm2-135m", "--hardware", "1x20GB+8GB"]) == 0
    said = capsys.readouterr().out
    assert "main memory reads 50 GB/s, cuda:0 reads 500 GB/s" in said


def test_faster_memory_takes_more_and_the_time_is_bytes_over_bandwidth(tmp_path: Path) -> None:
    machine = tmp_path / "m.yaml"
    machine.write_text("ram: 64GiB\nbandwidth: 100\nop_latency: 0.001\n")
    placing = placed(NOTHING, "smollm2-135m", str(machine), context=64)
    plan = ktopt.compile(SourceFile("r.yaml", NOTHING), "smollm2-135m")
    cache = next(m.cache_bytes for m in working_memory(plan, 64))
    assert placing.token_us == pytest.approx((plan.weight_bytes + cache) / 100e9 * 1e6, rel=0.01)


def test_61_layers_on_8_cards_are_placed_within_2_seconds_of_the_processor_each_time() -> None:
    placed(NOTHING, "smollm2-135m", "1x24GB")  # imports
    start = time.process_time()
    assert placed(NOTHING, "deepseek-v3", "8x80GB+2TB").proved
    assert placed(PINNED, "deepseek-v3", "8x80GB+2TB").proved
    assert time.process_time() - start < 4


def test_nothing_imports_the_solver_before_it_is_needed() -> None:
    script = (
        "import sys, ktopt; ktopt.compile('rules/smollm2/cpu.yaml', 'smollm2-135m', hardware='1x24GB');"
        "assert not [m for m in sys.modules if m.startswith(('scipy', 'ktopt.placing'))]"
    )
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-P", "-c", script], cwd=root, check=True)


def test_a_model_without_one_list_of_layers_is_refused() -> None:
    hardware = load_hardware("1x24GB")
    ruleset = validate(parse(SourceFile("r.yaml", NOTHING), report := Report()), report)
    assert ruleset is not None
    with pytest.raises(KtoptError, match="no single list of decoder layers"):
        place(ruleset, make_graph([Row("")]), hardware, PlanOptions(hardware=hardware))


BLOCKS = """\
version: 1
long_context: {max_seq_len: 262144, second_select_num: 32}
rules:
  - {match: "@model.layers.*.self_attn", replace: KDynamicAttention}
"""


def test_a_cache_of_blocks_is_in_main_memory_and_a_card_reads_what_is_chosen(tmp_path: Path) -> None:
    context, machine = 131_072, "1x24GB+64GB"
    placing = placed(BLOCKS, "llama-3.1-8b", machine, context)
    assert set(placing.assignment.homes) == {1}
    _, plan = filed(BLOCKS, "llama-3.1-8b", machine, tmp_path, context)
    memory = {each.device: each.together - each.process_bytes for each in working_memory(plan, context)}
    for device, held in placing.held.items():
        assert memory.get(device, 0) == pytest.approx(held, rel=0.02)
    assert placing.held["cpu"] > 5 * 2**30
    whole = placed(NOTHING, "llama-3.1-8b", "1x80GB+64GB", context)
    blocks = placed(BLOCKS, "llama-3.1-8b", "1x80GB+64GB", context)
    assert blocks.token_us < 0.8 * whole.token_us


def test_a_token_reads_of_a_layer_with_a_sliding_window_what_is_in_it() -> None:
    context = 32_768
    plan = ktopt.compile(SourceFile("r.yaml", NOTHING), "gemma-3-270m")
    config = plan.model.config
    caches = caches_of(plan, "cpu", context, 512).costs
    token = 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    assert "sliding_attention" in config["layer_types"]
    for layer, kind in enumerate(config["layer_types"]):
        seen = config["sliding_window"] if kind == "sliding_attention" else context
        assert caches[f"model.layers.{layer}.self_attn"].read == seen * token


def test_place_auto_in_mode_long_context_places_a_cache_of_blocks() -> None:
    auto = "version: 1\nlong_context: {max_seq_len: 262144}\nplace: auto\nrules: []\n"
    plan = ktopt.compile(SourceFile("r.yaml", auto), "llama-3.1-8b", hardware="1x24GB+64GB", mode="long_context", context=131_072)
    assert {step.generate_device for step in plan.steps if step.role == "attention"} == {"cuda:0"}
    plain = ktopt.compile(SourceFile("r.yaml", auto), "llama-3.1-8b", hardware="1x24GB+64GB", context=131_072)
    assert "cpu" in {step.generate_device for step in plain.steps if step.role == "attention"}


def test_a_context_whose_blocks_main_memory_does_not_hold_is_not_placed() -> None:
    with pytest.raises(NothingFits):
        placed(BLOCKS, "llama-3.1-8b", "1x24GB+6GB", 131_072)
