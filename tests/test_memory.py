"""What a plan says that it takes: by hand-made sums, beside a process that runs it, and over budget."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ktopt
from ktopt.cli import main
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.operator import build_config
from ktopt.operators.linear import ROUNDED_AT_A_TIME
from ktopt.registry import find
from ktopt.source import SourceFile
from ktopt.trees import load_tree
from ktopt.weights.usual import usual_storage
from ktopt.working_memory import Reckoning, fitting_context, over_limits, working_memory
from ktopt.working_memory.devices import LOADING_BYTES, RUNNING_BYTES
from ktopt.working_memory.loading import loading_peaks

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / "rules" / "smollm2"
GB = 1_000_000_000


def on(plan: ktopt.plan.Plan, device: str, context: int, **options: int):  # type: ignore[no-untyped-def]
    return next(each for each in working_memory(plan, context, **options) if each.device == device)


def rules(*lines: str, dtype: str = "float32", place: str = "cpu") -> SourceFile:
    text = f"version: 1\ndtype: {dtype}\nplace: {{'{place}': '@**'}}\nrules: [{', '.join(lines)}]\n"
    return SourceFile("r.yaml", text)


def test_a_prompt_read_whole_is_held_most_in_the_mlp() -> None:
    """576 hidden, 1,536 inner, 64 numbers a head; 3 heads of keys in 30 layers; float32."""
    found = on(ktopt.compile(SMOLLM2 / "reference.yaml", "smollm2-135m"), "cpu", 4096)
    assert found.cache_bytes == 4096 * 30 * 2 * 3 * 64 * 4
    assert (found.prefill.module, found.prefill.operator) == ("model.layers.0.mlp", "default")
    assert found.prefill.nbytes == 4096 * 4 * (4 * 576 + 3 * 1536 + 2 * 64)
    assert found.together == found.weight_bytes + found.cache_bytes + found.prefill.nbytes + RUNNING_BYTES


def test_a_fused_layer_holds_its_result_and_the_kernels_memory_for_512_tokens() -> None:
    found = on(ktopt.compile(SMOLLM2 / "cpu.yaml", "smollm2-135m"), "cpu", 8192)
    assert found.cache_bytes == 8192 * 30 * 2 * 3 * 64 * 2  # float16
    states, rotation, mask = 512 * 576 * 4, 512 * 2 * 64 * 4, 512 * 8192
    slab = 512 * ((2 * 576 + 2 * 1536) * 4 + 6 * 384)
    assert found.prefill.nbytes == 3 * states + rotation + mask + slab
    assert (found.prefill.module, found.prefill.operator) == ("model.layers.0", "KDecoderLayer")
    cache = 8192 * 3 * 64 * 2  # of a layer's keys, which may grow
    assert found.decode.nbytes == 3 * 576 * 4 + 2 * 64 * 4 + slab + cache


def test_a_batch_has_a_cache_of_each_sequence_and_passes_together() -> None:
    plan = ktopt.compile(SMOLLM2 / "reference.yaml", "smollm2-135m")
    one, four = on(plan, "cpu", 1024), on(plan, "cpu", 1024, batch=4)
    rotation = 1024 * 2 * 64 * 4  # the same for all
    assert four.cache_bytes == 4 * one.cache_bytes
    assert four.prefill.nbytes - rotation == 4 * (one.prefill.nbytes - rotation)


def test_grouped_experts_hold_each_row_several_times() -> None:
    """Qwen3-30B-A3B: 2,048 hidden, 768 inner, 8 experts a token; bfloat16."""
    line = "{match: 'name=experts', replace: KTransformersExperts, kwargs: {generate_op: KExpertsTorch}}"
    found = on(ktopt.compile(rules(line, dtype="bfloat16"), "qwen3-30b-a3b"), "cpu", 1000)
    row = max(2048 + 4 * 768, 2 * 2048 + 3 * 768, 3 * 2048 + 2 * 768)
    states = 4 * 2048 + 2 * 128
    assert found.prefill.module == "model.layers.0.mlp.experts"
    assert found.prefill.nbytes == 1000 * 2 * (8 * row + 2048 + states)


def test_a_layer_with_a_sliding_window_keeps_what_it_sees_and_what_has_just_come() -> None:
    plan = ktopt.compile(rules(), "gemma-3-270m")
    config = plan.model.config
    kinds = config["layer_types"]
    assert (kinds.count("full_attention"), kinds.count("sliding_attention"), config["sliding_window"]) == (3, 15, 512)
    token = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    assert on(plan, "cpu", 4096, chunk_size=256).cache_bytes == token * (3 * 4096 + 15 * (511 + 256))


def test_weights_that_are_packed_take_more_while_they_are() -> None:
    line = "{match: 'class=Linear', replace: KTransformersLinear, kwargs: {generate_op: KLinearMarlin}}"
    plan = ktopt.compile(rules(line, dtype="bfloat16", place="cuda:0"), "llama-3.1-8b")
    (card, *_) = (each for each in ktopt.memory(plan, 16).devices if each.device == "cuda:0")
    assert card.loading.module == "lm_head"  # the last and largest
    head = plan.by_path["lm_head"]
    assert card.loading.nbytes == card.weight_bytes - head.weight_bytes + 128_256 * 4096 * (2 + 2) + ROUNDED_AT_A_TIME * 12
    assert card.together == card.loading.nbytes


def test_what_latent_attention_keeps_in_two_pieces_counts_as_its_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 heads of 64 and 64 numbers on latents of 256; keys and values of kv_b_proj are two tensors in Q8_0."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    make = importlib.import_module("make_moe_gguf").make
    file = str(make(tmp_path / "m.gguf", "deepseek2-tiny", "Q4_K"))
    plan = ktopt.compile(ROOT / "rules" / "deepseek-v3" / "cpu.yaml", file, weights=file)
    step = plan.by_path["model.layers.0.self_attn.kv_b_proj"]
    assert (step.stored, step.weight_bytes) == (("Q8_0",), 4 * (64 + 64) * 256 // 32 * 34)
    own = ktopt.compile(rules(), file, weights=file)
    assert own.by_path["model.layers.0.self_attn.kv_b_proj"].weight_bytes == 4 * (64 + 64) * 256 * 4
    (cpu,) = ktopt.memory(own, 64, weights=file).devices
    read = cpu.loading.nbytes - LOADING_BYTES - cpu.weight_bytes
    assert 0 <= read <= 8 * 256 * 256 * 144 // 256  # the file's pages of one stack of experts


def test_experts_that_are_packed_are_numbers_in_main_memory_first() -> None:
    line = "{match: 'name=experts', replace: KTransformersExperts, kwargs: {generate_op: KExpertsMarlin}}"
    plan = ktopt.compile(rules(line, dtype="bfloat16", place="cuda:0"), "qwen3-30b-a3b", storage="Q4_K_M")
    graph = load_tree("qwen3-30b-a3b")
    loading = loading_peaks(plan, graph, usual_storage(graph, "Q4_K_M"))
    stack, stored = 128 * 1536 * 2048, 128 * 1536 * 2048 // 256 * 144
    assert loading["cpu"].nbytes == stack * 2 + stored
    first, spec = plan.by_path["model.layers.0.mlp.experts"], find("KTransformersExperts")
    assert spec is not None
    assert spec.loading is not None
    config, _ = build_config(spec, first.kwargs)
    matrix = 1536 * 2048
    in_work = matrix * (2 + 2) + matrix * 12
    assert matrix < ROUNDED_AT_A_TIME
    assert spec.loading(graph.by_path[first.path], config, "bfloat16") == first.weight_bytes + in_work


def test_the_context_that_fits_is_the_largest_that_does() -> None:
    reckoning = Reckoning(ktopt.compile(SMOLLM2 / "cpu.yaml", "smollm2-135m"))
    limits = {"cpu": reckoning.memory(3000)[0].together}
    most = fitting_context(reckoning, 8192, limits)
    assert not over_limits(reckoning.memory(most), limits)
    assert over_limits(reckoning.memory(most + 1), limits)
    assert most == 3000
    assert fitting_context(reckoning, 8192, {"cpu": 1}) == 0


def test_over_budget_is_an_error_with_the_largest_items_and_what_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("version: 1\nplace: {cuda:0: '@**'}\nrules: []\n")
    asked = [str(path), "--model", "llama-3.1-8b", "--hardware", "1x24GB", "--context"]
    assert main(["plan", *asked, "8192"]) == 0
    assert "cuda:0 has 25.8 GB: it fits" in capsys.readouterr().out
    assert main(["plan", *asked, "131072"]) == 1
    out, err = capsys.readouterr()
    said = " ".join(err.split())
    assert f"{path}:2:9: KT507 error: cuda:0 would hold" in said
    assert "the cache of 131,072 tokens 17.18 GB" in said
    assert "model.layers.*.mlp.gate_proj 3.76 GB" in said
    assert said.count(" GB,") + said.count(" MB,") >= 4  # five items
    assert "tokens fits (--context " in said
    assert "`ktopt place` says" in said
    assert "too little" in out
    assert main(["check", *asked, "131072"]) == 1
    assert "KT507" in capsys.readouterr().out
    assert main(["check", *asked, "8192"]) == 0


def test_the_context_said_to_fit_fits(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ktopt.compile(rules(dtype="bfloat16", place="cuda:0"), "llama-3.1-8b")
    memory = ktopt.memory(plan, 131_072, hardware="1x24GB")
    ((device, _, help),) = memory.findings()
    assert device == "cuda:0"
    tokens = int(help.partition("(--context ")[2].partition(")")[0])
    assert not ktopt.memory(plan, tokens, hardware="1x24GB").over
    assert ktopt.memory(plan, tokens + 1, hardware="1x24GB").over


def test_a_plan_file_is_asked_too_and_json_carries_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    asked = ["--context", "4096", "--batch", "2", "--format", "json"]
    assert main(["plan", "smollm2/cpu", "--model", "smollm2-135m", "-o", str(file)]) == 0
    capsys.readouterr()
    assert main(["plan", str(file), *asked, "--hardware", "here"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"] == json.loads(file.read_text())
    memory = found["memory"]
    assert (memory["context"], memory["batch"], memory["chunk_size"], memory["fits"]) == (4096, 2, 512, True)
    (cpu,) = memory["devices"]
    assert cpu["cache_bytes"] == 2 * 4096 * 30 * 2 * 3 * 64 * 2
    assert cpu["prefill"]["module"] == "model.layers.0"
    assert cpu["together_bytes"] == cpu["weight_bytes"] + cpu["cache_bytes"] + cpu["prefill"]["bytes"] + RUNNING_BYTES
    assert cpu["has_bytes"] > cpu["together_bytes"]
    assert main(["plan", "smollm2/cpu", "--model", "smollm2-135m", *asked]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert (memory["fits"], memory["devices"][0]["has_bytes"]) == (None, None)


def test_what_can_not_be_asked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ktopt.compile(SMOLLM2 / "cpu.yaml", "smollm2-135m")
    for wrong in ({"context": 0}, {"context": 16, "batch": 0}, {"context": 16, "chunk_size": 0}):
        with pytest.raises(UsageError, match="from 1 on"):
            ktopt.memory(plan, **wrong)
    assert main(["plan", "smollm2/cpu", "--model", "smollm2-135m", "--batch", "2"]) == 2
    assert "Give --context too" in capsys.readouterr().err
    assert main(["plan", "smollm2/cpu", "--model", "smollm2-135m", "--context", "16"]) == 0
    assert "what the devices have isn't known: --hardware says" in capsys.readouterr().out
    assert main(["check", "smollm2/cpu", "--model", "smollm2-135m", "--context", "16"]) == 2
    with pytest.raises(KtoptError):
        ktopt.memory("nowhere.json", 16)


def test_smollm2_takes_what_its_plan_says(smollm2: Path) -> None:
    """The peak of a process that loads, reads 3,000 tokens and decodes, less that of one with the same imports, within 5 %."""
    task = {"rules": str(SMOLLM2 / "cpu.yaml"), "weights": str(smollm2), "tokens": 3000, "decode": 4, "threads": 2, "batch": 1}
    engine = str(ROOT / "benchmarks" / "engines" / "memory_engine.py")
    done = subprocess.run([sys.executable, "-P", engine, json.dumps(task)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    measured = max(found[phase] for phase in ("loading", "prefill", "decode")) - found["baseline"]
    plan = ktopt.compile(SMOLLM2 / "cpu.yaml", smollm2, weights=smollm2)
    (cpu,) = ktopt.memory(plan, 3004, weights=smollm2).devices
    assert cpu.together == pytest.approx(measured, rel=0.05)
