"""What a session is refused at its start for, with the numbers and what to change; and the rules of mode long_context."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from apply_fixtures import make_model, make_tokenizer
from gguf_fixtures import make_folder
from rulefiles import CASES, needs_cases

import ktopt
from ktopt import load_model
from ktopt.config import Config, ModelSettings
from ktopt.diagnostics import CompileError, KtoptError, UsageError
from ktopt.long_context.rules import rules_for
from ktopt.plan import Plan
from ktopt.source import SourceFile

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[1]
LONG = {"max_seq_len": 4096, "block_size": 32, "local_windows_len": 64, "second_select_num": 4, "preselect_block": False}
LINEARS = "  - {match: 'class=Linear', replace: KTransformersLinear, kwargs: {generate_op: KLinearTorch}}\n"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("start") / "tiny", make_model("llama", seed=3))
    make_tokenizer().save_pretrained(made)
    return made


def start(tiny: Path, kvc2: dict[str, Any], rules: Any = None, **long: Any) -> Any:
    config = Config(ModelSettings(name_or_path="tiny"), given={"long_context": {**LONG, **long}, "kvc2": kvc2})
    return load_model(tiny, rules, mode="long_context", config=config)[0]


def test_a_disk_without_room_for_the_worst_case_is_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 50_000, 50_000))
    small = {"cpu_memory_size_GB": 0.0015, "disk_path": str(tmp_path / "not" / "yet")}
    with pytest.raises(KtoptError, match=r"a cache of 5120 tokens may put \d\.\d MB there, and 0\.1 MB are free there: raise"):
        start(tiny, small)
    assert not (tmp_path / "not").exists()


def test_a_disk_size_that_is_too_small_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(KtoptError, match=r"0\.0 MB it may take \(`disk_size_GB`\)"):
        start(tiny, {"cpu_memory_size_GB": 0.0015, "disk_path": str(tmp_path), "disk_size_GB": 1e-6})


def test_memory_that_does_not_hold_what_a_step_attends_to_is_refused(tiny: Path, tmp_path: Path) -> None:
    small = {"cpu_memory_size_GB": 0.0012, "disk_path": str(tmp_path)}
    with pytest.raises(KtoptError, match=r"one layer's step needs 100 blocks of \d rows in memory.*select fewer blocks"):
        start(tiny, small, second_select_num=100)
    assert not list(tmp_path.glob("session-*"))
    start(tiny, small, second_select_num=8)


@pytest.mark.parametrize("device_GB", [0.00083, 0.00086, 0.00089, 0.00092, 0.001, 0.0011])
def test_few_large_blocks_fit_into_two_tiers_of_memory(tiny: Path, device_GB: float) -> None:
    memory = {"gpu_memory_size_GB": device_GB, "cpu_memory_size_GB": 1}
    small = {"max_seq_len": 512, "block_size": 64, "local_windows_len": 64, "kv_type": "FP32", "chunk_size": 8}
    model = start(tiny, memory, **small)
    assert len(list(model.ktopt_session.generate(torch.ones(1, 400, dtype=torch.long), 2))) == 2


@pytest.mark.parametrize("memory", [{"cpu_memory_size_GB": 0.0015}, {"prefix_reuse": True}])
def test_a_disk_path_that_can_not_be_written_to_is_refused(
    tiny: Path, tmp_path: Path, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktopt.api.apply", lambda *a, **k: pytest.fail("the model was loaded"))
    (tmp_path / "file").write_text("")
    with pytest.raises(KtoptError, match="file is no folder that can be written to"):
        start(tiny, {**memory, "disk_path": str(tmp_path / "file" / "kvc")})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(KtoptError, match="is no folder that can be written to"):
        start(tiny, {**memory, "disk_path": str(tmp_path / "kvc")})


@pytest.mark.parametrize(("kvc2", "long", "said"), [
    ({"cpu_memory_size_GB": 0.0001}, {}, "must lie in memory takes .* and it may take 0.1 MB there"),
    ({"cpu_memory_size_GB": 0.0015}, {}, "don't fit into the 1.5 MB of main memory .* write `disk_path`"),
    ({}, {"max_seq_len": 64}, "the cache holds 3"),
    ({}, {"anchor_type": "QUEST", "anchor_num": 3}, "`anchor_num: 2`, not 3"),
    ({}, {"kv_type": "Q8_0"}, "Q8_0 keeps 32 numbers together"),
    ({}, {"block_size": "many"}, "`block_size` must be a whole number"),
    ({"cpu_memory_size_GB": float("inf")}, {}, "`cpu_memory_size_GB` must be a number up to 1e\\+15, not inf"),
    ({"disk_size_GB": 1e300}, {}, "`disk_size_GB` must be a number up to 1e\\+15"),
    ({"gpu_memory_size_GB": float("nan")}, {}, "`gpu_memory_size_GB` must be at least 0, not nan"),
    ({"disk_path": " "}, {}, "`disk_path` is empty"),
    ({"cpu_memory_size_GB": 0.0015, "disk_path": "~nobody-of-this-name/x"}, {}, "can't be a folder: Could not determine home"),
    ({"cpu_memory_size_GB": 0.0015, "disk_path": "x" * 300}, {}, "can't be a folder: File name too long"),
    ({"cpu_memory_size_GB": 0.0015, "disk_path": "a\0b"}, {}, "can't be a folder: embedded null byte"),
])  # fmt: skip
def test_settings_that_can_not_be_are_refused_before_a_weight_is_read(
    tiny: Path, kvc2: dict[str, Any], long: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktopt.api.apply", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(KtoptError, match=said):
        start(tiny, kvc2, **long)


def test_a_rule_s_own_kwargs_go_before_the_config(tiny: Path) -> None:
    rules = SourceFile(
        "r.yaml",
        "version: 1\nlong_context: {second_select_num: 5}\nrules:\n"
        "  - {match: '@model.layers.*.self_attn', replace: KDynamicAttention, kwargs: {token_step: 3}}\n",
    )
    model = start(tiny, {}, rules, token_step=2)
    with model.ktopt_session as session:
        settings = session.attention[0].settings[0]
        assert (settings.token_step, settings.second_select_num) == (3, 4)
        assert model.ktopt_long_context.long_context.token_step == 2


def test_settings_of_a_rule_file_hold_without_a_session_too(tiny: Path) -> None:
    text = "version: 1\nlong_context: {max_seq_len: 128, block_size: 32, local_windows_len: 32, preselect_block: false}\nrules:\n"
    attention = "  - {match: '@model.layers.*.self_attn', replace: KDynamicAttention}\n"
    model = ktopt.apply(SourceFile("r.yaml", text + attention), tiny)
    ids = torch.zeros(1, 130, dtype=torch.long)
    with pytest.raises(KtoptError, match=r"the cache holds 128 tokens \(max_seq_len\)"):
        model.generate(ids, max_new_tokens=1)


def operators(plan: Plan, role: str) -> set[str]:
    return {step.operator for step in plan.steps if step.role == role}


def test_attention_that_rules_leave_alone_keeps_blocks_and_the_plan_says_by_what(tmp_path: Path) -> None:
    rules = SourceFile("r.yaml", "version: 1\nrules:\n" + LINEARS + "  - {match: '@**.self_attn', replace: default}\n")
    plan = ktopt.compile(rules, "smollm2-135m", mode="long_context")
    assert operators(plan, "attention") == {"KDynamicAttention"}
    assert plan.rules[-1].id == "long_context"
    assert operators(ktopt.compile(rules, "smollm2-135m"), "attention") == {"default"}
    from ktopt.plan_check import open_plan
    from ktopt.plan_json import dump_plan

    (tmp_path / "plan.json").write_text(dump_plan(plan))
    assert open_plan(tmp_path / "plan.json") == plan


def test_attention_of_an_operator_of_its_own_stays_and_where_none_is_left_that_is_an_error() -> None:
    rules = SourceFile("r.yaml", "version: 1\nrules:\n  - {match: '@**.self_attn', replace: KDeepseekV2Attention}\n")
    with pytest.raises(KtoptError, match=r"becomes KDeepseekV2Attention \(r.yaml:3.*no attention of this plan keeps"):
        ktopt.compile(rules, "deepseek-v2-lite", mode="long_context")


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen3-30b-a3b", "gemma-3-270m", "mixtral-8x7b"])
def test_a_model_without_rules_has_some_that_fit_it(model: str) -> None:
    rules = rules_for(model, "cpu")
    plan = ktopt.compile(rules, model, mode="long_context")
    assert not plan.errors
    assert operators(plan, "attention") == {"KDynamicAttention"}
    assert operators(plan, "linear") == {"KTransformersLinear"}
    assert ktopt.compile(rules_for(model, "cuda:0"), model, device="cuda:0", mode="long_context").devices == ("cuda:0",)


def test_a_model_whose_attention_can_not_keep_blocks_is_refused_with_the_reason() -> None:
    said = "GatedDeltaNet, whose attention isn't known to go through .*: run without mode long_context"
    with pytest.raises(KtoptError, match=said):
        ktopt.compile(rules_for("qwen3-next-80b-a3b", "cpu"), "qwen3-next-80b-a3b", mode="long_context")


def test_a_plan_without_blocks_is_refused_and_an_unknown_mode_too(tiny: Path) -> None:
    plan = ktopt.compile(SourceFile("r.yaml", "version: 1\nrules:\n" + LINEARS), tiny)
    with pytest.raises(KtoptError, match="no attention of this plan keeps its cache in blocks"):
        load_model(tiny, plan, mode="long_context")
    with pytest.raises(UsageError, match="mode is one of normal, long_context"):
        load_model(tiny, mode="longcontext")
    with pytest.raises(CompileError):
        load_model(tiny, mode="long_context", config="nowhere.yaml")


@needs_cases
def test_the_mended_rule_file_of_internlm_checks_clean_and_the_one_that_was_shipped_does_not() -> None:
    shipped = ktopt.check(CASES / "upstream_rules" / "Internlm2_5-7b-Chat-1m.yaml", "internlm2.5-7b-1m")
    assert [(d.code, "prefill_device" in d.message) for d in shipped.errors] == [("KT403", True)]
    assert list(ktopt.check(ROOT / "examples" / "internlm2_5-7b-1m.yaml", "internlm2.5-7b-1m")) == []
    plan = ktopt.compile(ROOT / "examples" / "internlm2_5-7b-1m.yaml", "internlm2.5-7b-1m", remap={"cuda": "cpu"})
    assert operators(plan, "attention") == {"KLlamaAttention"}


def test_the_demo_reads_its_prompt_and_shows_the_tiers(smollm2: Path) -> None:
    """On a short context, with so little memory that blocks go to disk."""
    command = [sys.executable, "-P", str(ROOT / "examples" / "demo_139k_context.py"), "--model", str(smollm2), "--new-tokens", "4"]
    done = subprocess.run(
        [*command, "--context", "1024", "--host-GB", "0.02", "--device-GB", "0.02"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "1,024 of 1,024 tokens" in done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["answer", "prefill", "decode", "tier", "device", "host", "disk"]


def test_layers_on_several_devices_are_refused() -> None:
    from ktopt.long_context.room import device_of

    text = 'version: 1\nplace:\n  cpu: "layer in 0..9"\n  "cuda:0": "@**"\nrules: []\n'
    plan = ktopt.compile(SourceFile("r.yaml", text), "smollm2-135m", mode="long_context")
    with pytest.raises(KtoptError, match="these are on cpu, cuda:0: place them on one"):
        device_of(plan)
