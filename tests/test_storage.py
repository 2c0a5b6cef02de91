"""Selectors that ask how weights are stored, answered from the headers of a weight file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from gguf_fixtures import make_gguf, tiny_model

import ktopt
from ktopt.cli import main
from ktopt.compiler import run_stages
from ktopt.diagnostics import Diagnostic
from ktopt.source import SourceFile
from ktopt.trees import load_tree
from ktopt.weights.open import open_weights
from ktopt.weights.storage import storage_of

QUANT = """version: 1
rules:
  - {id: small, match: "quant=Q8_0 & class=Linear", replace: KTransformersLinear}
  - {id: rest, match: "class=Linear", replace: default}
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage") / "tiny.gguf"
    make_gguf(path, tiny_model("llama"), quant="Q8_0")
    return path


def check(text: str, model: object, **rest: object) -> list[Diagnostic]:
    return ktopt.check(SourceFile("r.yaml", text), model, **rest).sorted()


def codes(found: list[Diagnostic]) -> list[tuple[str, str]]:
    return [(d.code, str(d.severity)) for d in found if d.severity != "info"]


def test_storage_types_are_those_that_the_file_has(weights: Path) -> None:
    stored = {t.name: t.tensor_type.name for t in gguf.GGUFReader(weights).tensors}
    types = storage_of(weights, load_tree(weights))
    assert types["model.layers.0.self_attn.q_proj.weight"] == (stored["blk.0.attn_q.weight"],) == ("Q8_0",)
    assert types["model.norm.weight"] == (stored["output_norm.weight"],) == ("F32",)


@pytest.mark.parametrize("given", ["model", "weights", "both", "tree", "open"])
def test_a_rule_takes_what_is_stored_so_wherever_the_file_is_given(weights: Path, given: str) -> None:
    model, rest = {
        "model": (str(weights), None),
        "weights": (None, weights),
        "both": (load_tree(weights), weights),
        "tree": (load_tree(weights), None),
        "open": (weights, open_weights(weights)),
    }[given]
    matches = run_stages(SourceFile("r.yaml", QUANT), model, weights=rest).matches
    assert matches is not None
    taken = {m.path for m, d in matches.open if d.rule == 0}
    assert len([p for p in taken if p.endswith("_proj")]) == 14
    assert matches.needs_weights == ()


def test_another_type_takes_nothing_here_and_shadows_nothing(weights: Path) -> None:
    assert codes(check(QUANT, weights)) == []
    assert codes(check(QUANT.replace("Q8_0", "Q4_K"), weights)) == []


def test_without_a_file_a_rule_that_asks_is_a_warning_that_says_so() -> None:
    (d,) = (d for d in check(QUANT, "smollm2-135m") if d.severity != "info")
    assert (d.code, str(d.severity), d.span.start.line) == ("KT312", "warning", 3)
    assert "--weights" in (d.help or "")


def test_without_a_file_no_module_is_taken_to_be_stored_so_and_fit_is_not_judged() -> None:
    norms = QUANT.replace("quant=Q8_0 & class=Linear", "quant=F32").replace("KTransformersLinear", "KDeepseekV2Attention", 1)
    assert "KT407" not in {code for code, _ in codes(check(norms, "smollm2-135m"))}


@pytest.mark.parametrize("command", ["check", "plan", "why", "graph"])
def test_commands_read_the_file(command: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(QUANT.replace('class=Linear", replace: KTr', '@model.layers.0.mlp.up_proj", expect: 1, replace: KTr'))
    module = ["model.layers.0.mlp.up_proj"] if command == "why" else []
    for named in (["--model", weights], ["--weights", weights]):
        assert main([command, *module, str(path), *map(str, named)]) == 0, capsys.readouterr().err
    capsys.readouterr()
    without = main([command, *module, str(path), "--model", "smollm2-135m"])
    said = capsys.readouterr()
    assert without == (1 if command == "plan" else 0)
    assert "weights" in said.out + said.err or command in ("why", "graph")


def test_headers_are_read_without_torch(weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(QUANT)
    load_tree(weights)  # so that its tree is kept
    code = f"import sys, ktopt; ktopt.check({str(path)!r}, {str(weights)!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
