"""What a plan counts for weights that stay as their file stores them, against what a model that is made by it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from apply_fixtures import make_model
from gguf_fixtures import make_gguf, tiny_model

import ktopt
from ktopt.cli import main
from ktopt.kernels import cpu
from ktopt.operators.modules.embedding import KEmbedding
from ktopt.operators.modules.linear_cpu import KLinearCPUInfer
from ktopt.plan import Plan
from ktopt.plan_check import verify_model
from ktopt.plan_diff import diff_plans
from ktopt.plan_json import PlanFileError, dump_plan, plan_from_json
from ktopt.planning import UNTOLD
from ktopt.source import SourceFile
from ktopt.trees import load_tree
from ktopt.weights import StoredTensor

RULES = """
version: 1
dtype: float32
place: {cpu: "@**"}
rules:
  - {id: linears, match: class=Linear, replace: KTransformersLinear}
  - {id: table, match: class=Embedding, replace: KEmbedding}
"""
EXPERTS = '  - {id: experts, match: "class=MixtralExperts | class=Qwen3MoeExperts", replace: KTransformersExperts}\n'
NO_TABLE = "\n".join(line for line in RULES.splitlines() if "KEmbedding" not in line)
HEAD = "lm_head"
TABLE = "model.embed_tokens"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("stored") / "m.gguf", make_model("tied"), "Q8_0")


def plan(model: Any, rules: str = RULES, **options: Any) -> Plan:
    return ktopt.compile(SourceFile("r.yaml", rules), model, **options)


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters, buffers and blocks, each once."""
    blocks = {part for module in model.modules() for _, part in getattr(module, "parts", ())}
    experts = [module.stored for module in model.modules() if getattr(module, "stored", None) is not None]
    blocks |= {part for stored in experts for part in (*stored.gate_up, *stored.down)}
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + sum(part.nbytes for part in blocks)


@pytest.mark.skipif(not cpu.available()[0], reason="the CPU kernels were not built")
@pytest.mark.parametrize("kind", ["llama", "tied", "gemma3_text", "qwen2", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0"])
def test_a_plans_bytes_are_what_its_model_holds(kind: str, quant: str, tmp_path: Path) -> None:
    model = make_model(kind) if kind == "tied" else tiny_model(kind)
    file = make_gguf(tmp_path / "m.gguf", model, quant)
    made = plan(file, rules=RULES + EXPERTS * kind.endswith(("mixtral", "_moe")))
    assert made.weight_bytes == held_bytes(ktopt.apply(made, weights=file))


@pytest.mark.skipif(not cpu.available()[0], reason="the CPU kernels were not built")
def test_on_a_cpu_a_rule_that_names_no_op_gets_the_ops_that_compute_on_stored_weights(tied: Path) -> None:
    made = plan(tied)
    assert made.by_path[HEAD].kwargs["generate_op"] == "KLinearCPUInfer"
    assert made.by_path[TABLE].kwargs["generate_op"] == "KEmbeddingCPU"
    model = ktopt.apply(made, weights=tied)
    assert isinstance(model.lm_head, KLinearCPUInfer)
    assert isinstance(model.model.embed_tokens, KEmbedding)


def test_elsewhere_it_gets_ops_that_run_there(tied: Path) -> None:
    made = plan(tied, rules=RULES.replace("cpu:", "cuda:"))
    assert made.by_path[TABLE].kwargs["generate_op"] == "KEmbeddingTorch"
    assert made.by_path[TABLE].runs == {}
    assert made.by_path[TABLE].stored == ()
    assert made.by_path[TABLE].weight_bytes == 4 * 320 * 64


@pytest.mark.parametrize("given", ["the model", "beside a config", "beside a tree"])
def test_stored_bytes_count_wherever_the_file_is_given(tied: Path, given: str) -> None:
    tree = load_tree(tied)
    made = {
        "the model": lambda: plan(tied),
        "beside a config": lambda: plan(tree.config, weights=tied),
        "beside a tree": lambda: plan(tree, weights=tied),
    }[given]()
    up = made.by_path["model.layers.0.mlp.up_proj"]
    assert (up.stored, up.weight_bytes) == (("Q8_0",), 96 * 64 // 32 * 34)
    assert (made.by_path[TABLE].stored, made.by_path[TABLE].weight_bytes) == (("Q8_0",), 320 * 64 // 32 * 34)
    assert (made.by_path[HEAD].weight_bytes, made.by_path[HEAD].notes) == (0, (f"shares its weight with {TABLE}",))
    assert made.by_path["model.norm"].stored == ()
    assert UNTOLD not in made.notes


def test_without_a_file_the_plans_dtype_counts_and_the_plan_says_so(tied: Path) -> None:
    made = plan(load_tree(tied).config)
    assert made.by_path[TABLE].weight_bytes == 4 * 320 * 64
    assert made.notes == (UNTOLD,)
    assert not plan(make_model("tied"), device="cpu").notes


def test_a_table_held_as_numbers_and_a_head_in_blocks_share_nothing(tied: Path) -> None:
    made = plan(tied, rules=NO_TABLE)
    assert made.by_path[TABLE].weight_bytes == 4 * 320 * 64
    assert (made.by_path[HEAD].weight_bytes, made.by_path[HEAD].notes) == (320 * 64 // 32 * 34, ())


class Headers:
    """A source of which only headers are asked: another file's, with some types changed."""

    path = Path("changed.gguf")

    def __init__(self, source: Any, types: Mapping[str, str], **changes: Any) -> None:
        self.source, self.types, self.changes = source, types, changes

    def __contains__(self, name: str) -> bool:
        return name in self.source

    def stored(self, name: str) -> StoredTensor:
        found = self.source.stored(name)
        kind = self.types.get(name)
        return found if kind is None else replace(found, types=(kind,), **self.changes)

    def config(self) -> None:
        return None


def test_a_type_without_a_kernel_counts_in_the_plans_dtype_and_the_plan_says_why(tied: Path) -> None:
    from ktopt.weights.open import open_weights

    up = "model.layers.0.mlp.up_proj"
    source = Headers(open_weights(tied), {f"{up}.weight": "IQ2_XS"})
    made = plan(load_tree(tied), weights=source)
    assert (made.by_path[up].weight_bytes, made.by_path[up].stored) == (4 * 96 * 64, ())
    assert made.by_path[up].notes == ("stored as IQ2_XS, for which there is no kernel: held in float32",)
    assert made.by_path["model.layers.1.mlp.up_proj"].stored == ("Q8_0",)


def test_a_weight_that_is_stored_transposed_counts_in_the_plans_dtype(tied: Path) -> None:
    from ktopt.weights.open import open_weights

    up = "model.layers.0.mlp.up_proj"
    made = plan(load_tree(tied), weights=Headers(open_weights(tied), {f"{up}.weight": "Q8_0"}, in_place=False))
    assert (made.by_path[up].weight_bytes, made.by_path[up].stored) == (4 * 96 * 64, ())


def test_a_plan_file_keeps_what_is_stored_and_is_taken_back(tied: Path) -> None:
    made = plan(tied)
    again = plan_from_json(json.loads(dump_plan(made)))
    assert again == made
    verify_model(again, tied)
    assert diff_plans(made, again).empty
    assert any("stored [Q8_0] -> none" in change.words() for change in diff_plans(made, plan(load_tree(tied).config)).changes)


@pytest.mark.parametrize(
    ("path", "changes", "said"),
    [
        (TABLE, {"weight_bytes": 1}, "weight_bytes 1, and its tensors take 21760 to 21760 as stored"),
        (TABLE, {"stored": ["Q4_K"]}, "weight_bytes 21760, and its tensors take 81920 to 81920 as stored"),
        (TABLE, {"stored": ["IQ2_XS"]}, "stored as IQ2_XS, and its op doesn't keep IQ2_XS"),
        (TABLE, {"stored": "Q8_0"}, "must be a list"),
        ("model.norm", {"stored": ["Q8_0"]}, "stored as Q8_0, and its op doesn't keep Q8_0"),
        (HEAD, {"notes": []}, "weight_bytes 0, and its tensors take 21760 to 21760 as stored"),
    ],
)
def test_a_plan_file_whose_stored_types_do_not_fit_is_refused(tied: Path, path: str, changes: dict[str, Any], said: str) -> None:
    data = json.loads(dump_plan(plan(tied)))
    next(step for step in data["steps"] if step["path"] == path).update(changes)
    with pytest.raises(PlanFileError, match=said):
        verify_model(plan_from_json(data), tied)


def test_the_table_shows_what_weights_are_stored_as(tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text(RULES)
    main(["plan", str(tmp_path / "r.yaml"), "-w", str(tied)])
    shown = capsys.readouterr().out
    assert "KEmbeddingCPU" in shown
    assert "Q8_0" in shown
    assert UNTOLD not in shown
