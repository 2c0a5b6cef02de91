"""What a usual GGUF file of a model takes, by its tree alone, beside files that were published."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_fixtures import make_gguf, tiny_model

import ktopt
from ktopt.cli import main
from ktopt.diagnostics import UsageError
from ktopt.trees import load_tree
from ktopt.weights.usual import check_storage, usual_storage

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = {
    ("llama-3.1-8b", "Q4_K_M"): 4.92, ("llama-3.1-70b", "Q4_K_M"): 42.52, ("llama-3.1-70b", "Q5_K_M"): 49.95,
    ("llama-3.1-70b", "Q6_K"): 57.89, ("llama-3.1-70b", "Q8_0"): 74.98, ("qwen3-30b-a3b", "Q4_K_M"): 18.6,
    ("mixtral-8x7b", "Q4_K_M"): 28.4, ("deepseek-v3", "Q4_K_M"): 404.43, ("deepseek-v3", "Q5_K_M"): 475.40,
    ("deepseek-v3", "Q6_K"): 550.80, ("deepseek-v3", "Q8_0"): 713.29,
}  # fmt: skip
"""GB of files that were published, as llama.cpp's quantize wrote them."""


@pytest.mark.parametrize(("model", "kind"), PUBLISHED)
def test_files_take_what_published_ones_do(model: str, kind: str) -> None:
    graph = load_tree(model)
    stored = usual_storage(graph, kind)
    total = sum(tensor.nbytes for name, tensor in stored.items() if name not in graph.tied)
    assert total / 1e9 == pytest.approx(PUBLISHED[model, kind], rel=0.015)


def test_a_plan_without_weights_counts_what_stays_stored_as_the_usual_file_has_it() -> None:
    rules = ROOT / "rules/llama/cpu.yaml"
    plain, usual = (ktopt.compile(rules, "llama-3.1-8b", **options) for options in ({}, {"storage": "q4_k_m"}))
    assert plain.by_path["model.layers.3.self_attn.q_proj"].stored == ()
    assert usual.by_path["model.layers.3.self_attn.q_proj"].stored == ("Q4_K",)
    assert usual.by_path["model.layers.3.mlp.down_proj"].stored == ("Q6_K",)
    assert usual.by_path["lm_head"].stored == ("Q6_K",)
    assert usual.weight_bytes == pytest.approx(4.92e9, rel=0.01)
    assert any("Q4_K_M" in note for note in usual.notes)
    assert not any("Q4_K_M" in note for note in plain.notes)


def test_rows_that_are_no_whole_blocks_fall_back_to_smaller_ones() -> None:
    stored = usual_storage(load_tree("glm-4.5-air"), "Q4_K_M")
    assert stored["model.layers.9.mlp.experts.down_proj"].types == ("Q5_0",)
    assert stored["model.layers.10.mlp.experts.down_proj"].types == ("Q8_0",)
    assert stored["model.layers.9.mlp.experts.gate_up_proj"].types == ("Q4_K", "Q4_K")
    assert stored["model.layers.9.mlp.gate.weight"].types == ("F32",)


def test_an_unknown_kind_of_file_is_refused_with_those_there_are() -> None:
    assert check_storage("q8_0") == "Q8_0"
    with pytest.raises(UsageError, match="did you mean Q4_K_M"):
        check_storage("Q4_K_L")
    with pytest.raises(UsageError, match="no kind of weight file"):
        ktopt.compile(ROOT / "rules/llama/cpu.yaml", "llama-3.1-8b", storage="int4")


def test_weights_that_are_there_count_and_no_usual_ones(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", tiny_model("llama"), "Q8_0")
    plan = ktopt.compile(ROOT / "rules/llama/cpu.yaml", weights=file, storage="Q4_K_M")
    assert plan == ktopt.compile(ROOT / "rules/llama/cpu.yaml", weights=file)
    assert plan.by_path["lm_head"].stored == ("Q8_0",)


def test_plan_and_place_reckon_with_a_usual_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = ("--model", "deepseek-v2-lite", "--storage", "Q4_K_M")
    assert main(["plan", "deepseek-v2-lite/cpu", *model, "--hardware", "cpu+16GB"]) == 0
    assert "usual Q4_K_M file" in capsys.readouterr().out
    assert main(["plan", "deepseek-v2-lite/cpu", *model[:2], "--hardware", "cpu+16GB"]) == 1
    shown, said = capsys.readouterr()
    assert "KT504" in said
    assert "--storage Q4_K_M" in said
    assert "--storage KIND as long as there are none, counts them so" in " ".join(shown.split())
    assert main(["place", "deepseek-v2-lite/cpu", *model, "--hardware", "cpu+16GB"]) == 0
    assert "16GB" in capsys.readouterr().out
    assert main(["plan", "deepseek-v2-lite/cpu", *model, "--lock"]) == 2
    assert "--storage" in capsys.readouterr().err


def test_what_shows_plans_reckons_with_a_usual_file_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = ("--model", "deepseek-v2-lite")
    for command, more in (
        (["check", str(ROOT / "rules/deepseek-v3/cpu.yaml")], ["--hardware", "cpu+16GB", "--context", "4096"]),
        (["graph", "deepseek-v2-lite/cpu"], ["--hardware", "cpu+16GB", "-o", str(tmp_path / "plan.svg")]),
    ):
        assert main([*command, *model, *more]) == 1
        assert main([*command, *model, *more, "--storage", "Q4_K_M"]) == 0
    capsys.readouterr()
    assert main(["why", "model.layers.3.mlp.experts", "deepseek-v2-lite/cpu", *model, "--storage", "Q4_K_M"]) == 0
    assert main(["plan", "deepseek-v2-lite/cpu", *model, "--storage", "Q4_K_M", "-o", str(tmp_path / "plan.json")]) == 0
    assert main(["diff", str(tmp_path / "plan.json"), "deepseek-v2-lite/cpu", *model, "--storage", "Q4_K_M"]) == 0
    assert main(["check", str(ROOT / "rules/deepseek-v3/cpu.yaml"), *model, "--storage", "Q4_K_M", "--locked"]) == 2
    assert "--locked compares with a lock, which knows no --storage" in capsys.readouterr().err
