"""ktopt init: for every model and machine a rule file that checks clean, plans, and fits."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

from ktopt.authoring.fmt import format_text
from ktopt.authoring.init_rules import init_rules, operator_for
from ktopt.authoring.layout import SHARE_OF_MEMORY, Sizes, lay_out, measure
from ktopt.cli import main
from ktopt.compiler import run_stages
from ktopt.diagnostics import KtoptError
from ktopt.graph import ModuleGraph
from ktopt.hardware import load_hardware
from ktopt.placement import Hardware
from ktopt.plan import Plan
from ktopt.plan_diff import device_bytes
from ktopt.source import SourceFile
from ktopt.trees import known_models, load_tree

GIB = 1 << 30
MACHINES = (None, "cpu", "1x24GB", "2x24GB", "8x80GB")
LARGE = ("deepseek-r1", "kimi-k2", "deepseek-v2", "qwen3-235b-a22b", "glm-4.5", "llama-2-70b", "mixtral-8x22b")
MODELS = [name for name in known_models() if name not in LARGE]


def machine(name: str | None) -> Hardware | None:
    return load_hardware(name) if name else None


def planned(text: str, graph: ModuleGraph, hardware: Hardware | None) -> Plan:
    compilation = run_stages(SourceFile("rules.yaml", text), graph, hardware=hardware)
    assert [str(d) for d in compilation.report] == []
    assert compilation.plan is not None
    return compilation.plan


@pytest.mark.parametrize("model", MODELS)
def test_its_file_checks_clean_plans_and_fits_on_every_machine(model: str) -> None:
    graph = load_tree(model)
    for name in MACHINES:
        hardware = machine(name)
        text = init_rules(graph, hardware)
        plan = planned(text, graph, hardware)
        assert format_text(SourceFile("", text)) == text
        for device, count in device_bytes(plan).items():
            found = hardware.device(device) if hardware else None
            assert device == "cpu" or (found is not None and count <= found.memory_bytes)


@pytest.fixture(scope="module")
def deepseek() -> ModuleGraph:
    return load_tree("deepseek-v3")


def test_it_has_a_rule_for_every_part_and_a_count_for_every_rule(deepseek: ModuleGraph) -> None:
    rules = yaml.safe_load(init_rules(deepseek, machine("8x80GB")))["rules"]
    found = {rule["id"]: rule["replace"] for rule in rules}
    assert found["router"] == "KMoEGate"
    assert found["moe"] == "KDeepseekV3MoE"
    assert found["attention"] == "KDeepseekV2Attention"
    assert {"rotary", "experts", "experts-on-cpu", "norm", "linears", "head"} <= found.keys()
    assert all(rule["expect"] > 0 for rule in rules)


def test_it_is_valid_by_the_schema_that_its_modeline_names(deepseek: ModuleGraph) -> None:
    schema = json.loads((files("ktopt.schemas") / "ruleset.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(yaml.safe_load(init_rules(deepseek, machine("2x24GB"))), schema)


def test_what_attention_absorbs_is_left_alone(deepseek: ModuleGraph) -> None:
    plan = planned(init_rules(deepseek), deepseek, None)
    assert plan.by_path["model.layers.3.self_attn.kv_b_proj"].operator == "default"
    assert plan.by_path["model.layers.3.self_attn.o_proj"].operator == "KTransformersLinear"


def test_experts_go_to_main_memory_where_the_cards_do_not_hold_them() -> None:
    graph = load_tree("qwen3-30b-a3b")
    hardware = machine("1x24GB")
    plan = planned(init_rules(graph, hardware), graph, hardware)
    where = {plan.by_path[f"model.layers.{n}.mlp.experts"].generate_device for n in range(48)}
    assert where == {"cuda:0", "cpu"}
    assert plan.by_path["model.layers.47.self_attn.q_proj"].generate_device == "cuda:0"


def test_a_model_that_fits_is_spread_evenly_and_in_order() -> None:
    graph = load_tree("llama-3.1-70b")
    hardware = machine("8x80GB")
    plan = planned(init_rules(graph, hardware), graph, hardware)
    held = {device: count for device, count in device_bytes(plan).items() if device != "cpu"}
    assert len(held) == 8
    assert max(held.values()) < 1.2 * min(held.values())
    devices = [plan.by_path[f"model.layers.{n}.mlp.up_proj"].generate_device for n in range(80)]
    assert devices == sorted(devices)


def test_a_dense_model_that_does_not_fit_has_its_last_layers_in_main_memory() -> None:
    graph = load_tree("llama-3.1-8b")
    hardware = Hardware("a small card", (machine("1x24GB").devices[0].__class__("cuda:0", 8 * GIB),))  # type: ignore[union-attr]
    plan = planned(init_rules(graph, hardware), graph, hardware)
    assert plan.by_path["model.layers.0.mlp.up_proj"].generate_device == "cuda:0"
    assert plan.by_path["model.layers.31.mlp.up_proj"].generate_device == "cpu"
    assert plan.by_path["lm_head"].generate_device == "cpu"


def test_a_tied_head_stays_with_its_embedding() -> None:
    graph = load_tree("smollm2-135m")
    hardware = machine("2x24GB")
    plan = planned(init_rules(graph, hardware), graph, hardware)
    assert plan.by_path["lm_head"].generate_device == plan.by_path["model.embed_tokens"].generate_device
    assert plan.by_path["lm_head"].weight_bytes < plan.by_path["model.embed_tokens"].weight_bytes / 3  # a packed copy, in 4 bits


def test_parts_add_up_to_the_model() -> None:
    graph = load_tree("mixtral-8x7b")
    assert measure(graph, "bfloat16").total == planned(init_rules(graph), graph, None).weight_bytes


def test_no_device_is_filled_beyond_its_share() -> None:
    sizes = Sizes(dict.fromkeys(range(10), 2 * GIB), dict.fromkeys(range(10), 3 * GIB), GIB, GIB)
    hardware = machine("2x24GB")
    assert hardware is not None
    layout = lay_out(sizes, hardware)
    assert layout.experts is not None
    for device in hardware.devices:
        here = [n for n, d in layout.layers.items() if d == device.name]
        used = sum(sizes.layers[n] + (sizes.experts[n] if n in layout.experts else 0) for n in here)
        used += sizes.ends if layout.ends == device.name else 0
        assert 0 < used <= device.memory_bytes * SHARE_OF_MEMORY
    assert 0 < len(layout.experts) < 10


def test_an_operator_carries_the_name_of_the_class_that_it_is_for() -> None:
    graph = load_tree("qwen3-next-80b-a3b")
    names = {m.cls.simple_name: operator_for(m).name for m in graph.modules if m.role in ("attention", "norm", "moe")}
    assert names["Qwen3NextGatedDeltaNet"] == "KQwen3NextGatedDeltaNet"
    assert names["Qwen3NextSparseMoeBlock"] == "KQwen3NextSparseMoeBlockV2"
    assert operator_for(load_tree("gemma-3-270m").by_path["model.norm"]).name == "default"


def test_a_tree_without_decoder_layers_is_refused() -> None:
    with pytest.raises(KtoptError, match="decoder layers"):
        init_rules(ModuleGraph(load_tree("smollm2-135m").modules[:1], "nothing"))


class TestCommand:
    def test_it_writes_a_file_that_check_finds_nothing_in(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "rules" / "rules.yaml"
        path.parent.mkdir()
        (tmp_path / "ktopt.schema.json").write_text("{}")
        assert main(["init", "--model", "moonlight-16b-a3b", "--hardware", "2x24GB", "-o", str(path)]) == 0
        capsys.readouterr()
        assert main(["check", str(path), "--model", "moonlight-16b-a3b", "--fail-on", "info"]) == 0
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first == "# yaml-language-server: $schema=../ktopt.schema.json"

    def test_without_a_schema_in_the_project_it_names_none(self, tmp_path: Path) -> None:
        path = tmp_path / "rules.yaml"
        assert main(["init", "--model", "smollm2-135m", "-o", str(path)]) == 0
        assert "$schema" not in path.read_text(encoding="utf-8")

    def test_it_overwrites_nothing_unless_told_to(self, tmp_path: Path) -> None:
        path = tmp_path / "rules.yaml"
        path.write_text("mine", encoding="utf-8")
        assert main(["init", "--model", "smollm2-135m", "-o", str(path)]) == 2
        assert path.read_text(encoding="utf-8") == "mine"
        assert main(["init", "--model", "smollm2-135m", "-o", str(path), "--force", "--schema", "https://example.org/s.json"]) == 0
        assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=https://example.org/s.json\n")

    def test_main_memory_that_is_too_small_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["init", "--model", "qwen3-30b-a3b", "--hardware", "1x24GB+8GB"]) == 1
        captured = capsys.readouterr()
        assert "KT504" in captured.err
        assert "qwen3-30b-a3b doesn't fit on 1x24GB+8GB: main memory of 8.6 GB would have to hold " in captured.err
        assert " GB too much" in captured.err
        assert captured.out.startswith("# qwen3-30b-a3b")
