"""Plans of real multi-device rule files, cut down to a few tiny layers, run on fake tensors; without one of their transfers they
fail with the module's name, whichever part of torch notices."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from apply_fixtures import cut
from small_plans import cut_down

import ktopt
from ktopt.applying.dry_run import dry_run
from ktopt.diagnostics import KtoptError
from ktopt.plan import Plan

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


@cache
def small_plan(file: str) -> Plan:
    """The file's plan for the real model, cut down."""
    name, kind, changes = next(found for start, found in MODELS.items() if Path(file).name.startswith(start))
    return cut_down(ktopt.compile(RULES / file, name), kind, changes)


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
