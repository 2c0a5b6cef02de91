"""Plans of real multi-device rule files, cut down to a few tiny layers, run on fake tensors; without one of their transfers they
fail with the module's name, whichever part of torch notices."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from apply_fixtures import cut
from gguf_fixtures import tiny_model

import ktopt
from ktopt import registry
from ktopt.applying.dry_run import dry_run
from ktopt.diagnostics import KtoptError
from ktopt.operator import build_config
from ktopt.plan import Plan
from ktopt.transfers import derive_transfers
from ktopt.trees import graph_from_module

RULES = Path(__file__).resolve().parents[2] / "shared" / "cases" / "upstream_rules"
MODELS = {
    "DeepSeek-V2-Lite": ("deepseek-v2-lite", "deepseek_v2", {"q_lora_rank": None}),
    "DeepSeek-V2": ("deepseek-v2", "deepseek_v2", {"q_lora_rank": 8}),
    "DeepSeek-V3": ("deepseek-v3", "deepseek_v3", {}),
    "Mixtral": ("mixtral-8x7b", "mixtral", {}),
    "Moonlight": ("moonlight-16b-a3b", "deepseek_v3", {"q_lora_rank": None}),
    "Qwen2": ("qwen2-57b-a14b", "qwen2_moe", {}),
    "Qwen3": ("qwen3-30b-a3b", "qwen3_moe", {}),
}
"""By the beginning of a rule file's name: the shipped model, and the tiny one of its kind."""
ONE_DEVICE = {"Internlm2_5-7b-Chat-1m.yaml"}
FILES = sorted(path.relative_to(RULES).as_posix() for path in RULES.rglob("*.yaml") if path.name not in ONE_DEVICE)
LAYER = re.compile(r"^model\.layers\.(\d+)")


@cache
def small_plan(file: str) -> Plan:
    """The file's plan for the real model, its layers cut down to the first and one for each way that a layer is placed."""
    name, kind, changes = next(found for start, found in MODELS.items() if Path(file).name.startswith(start))
    plan = ktopt.compile(RULES / file, name)
    layers = kept_layers(plan)
    with torch.device("meta"):
        model = tiny_model(kind, num_hidden_layers=len(layers), **changes)
    graph = graph_from_module(model)
    steps = []
    for module in graph.modules:
        step = plan.by_path[LAYER.sub(lambda found: f"model.layers.{layers[int(found[1])]}", module.path)]
        inside = LAYER.sub(lambda found: f"model.layers.{layers.index(int(found[1]))}", step.inside)
        owner = plan.by_path[step.inside] if step.inside else step
        spec = registry.find(owner.operator)
        config = build_config(spec, owner.kwargs)[0]
        size = spec.footprint(module, config, step.dtype).weight_bytes if module.tensors else 0
        steps.append(step._replace(path=module.path, inside=inside, weight_bytes=size))
    ref = replace(plan.model, tree=graph.digest, config=model.config.to_dict(), config_digest="")
    return replace(plan, model=ref, steps=tuple(steps), transfers=derive_transfers(graph, steps))


def kept_layers(plan: Plan) -> list[int]:
    placed: dict[int, list[str]] = {}
    for step in plan.steps:
        found = LAYER.match(step.path)
        if found and not step.path.endswith("gate"):
            placed.setdefault(int(found[1]), []).append(f"{step.path[found.end() :]} {step.generate_device}")
    ways = {tuple(places): layer for layer, places in reversed(placed.items()) if layer > 3}
    return sorted({0, *ways.values(), max(placed)})


@pytest.mark.skipif(not FILES, reason=f"{RULES} is not here")
@pytest.mark.parametrize("file", FILES)
def test_a_real_rule_files_transfers_suffice_and_one_less_is_a_named_failure(file):
    plan = small_plan(file)
    assert len(plan.devices) > 1
    assert plan.transfers
    dry_run(plan)
    index = random.Random(file).randrange(len(plan.transfers))
    check_that_it_is_missed(plan, index)


def check_that_it_is_missed(plan: Plan, index: int) -> None:
    transfer = plan.transfers[index]
    with pytest.raises(KtoptError, match="lacks a transfer") as caught:
        dry_run(replace(plan, transfers=cut(plan.transfers, index)))
    message = str(caught.value)
    assert not re.search(r"cuda:1\d\d", message), "a stand-in's name"
    assert transfer.source in message or transfer.target in message
    assert message.startswith("model.") or message.partition(":")[0] in ("lm_head", plan.model.architectures[0])


@pytest.mark.skipif(not FILES, reason=f"{RULES} is not here")
def test_a_missing_way_back_from_mla_is_reported_in_the_plans_own_device_names():
    """torch's fake tensors notice this one themselves, and call the devices by the names that stand for them."""
    plan = small_plan("npu/DeepSeek-V3-Chat-300IA2-npu-serve.yaml")
    index = next(i for i, t in enumerate(plan.transfers) if t.path.endswith("self_attn.kv_b_proj") and t.side == "output")
    check_that_it_is_missed(plan, index)
