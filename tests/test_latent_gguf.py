"""KDeepseekV2Attention on small GGUF models: the rule of KTransformers' article, kv_b in one piece and in two, against transformers
on the weights that the file holds.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import gguf_fixtures
import pytest
import torch
from apply_fixtures import greedy
from gguf_fixtures import make_gguf, tiny_model

import ktopt
from ktopt.diagnostics import KtoptError
from ktopt.kernels import cpu
from ktopt.operators.modules.attention_mla import KDeepseekV2Attention
from ktopt.operators.modules.latent_linear import KLatentLinear

PROMPT = torch.arange(18).view(1, 18) * 11 % 300
"""Longer than what counts as decoding, and not too long for exact products."""
ARTICLE = r"""
- match:
    name: "^model\\.layers\\..*\\.self_attn$"
  replace:
    class: ktransformers.operators.attention.KDeepseekV2Attention
    kwargs:
      generate_device: "cuda"
      prefill_device: "cuda"
      absorb_for_prefill: true
"""
STORED = """
- match: {class: torch.nn.Linear}
  replace: {class: KTransformersLinear, kwargs: {generate_op: KLinearCPUInfer, generate_device: cpu}}
"""


def load(tmp_path: Path, text: str, weights: Path) -> Any:
    rules = tmp_path / "rules.yaml"
    rules.write_text(text)
    return ktopt.apply(rules, weights, weights, remap={"cuda": "cpu"}, device="cpu", dtype="float32")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("kv_b", ["split", "fused"])
@pytest.mark.parametrize(("quant", "tolerance"), [("F32", 1e-5), ("Q8_0", 5e-2)])
def test_the_articles_rule_on_a_gguf_gives_the_logits_of_its_weights(
    tmp_path: Path, kind: str, kv_b: str, quant: str, tolerance: float
) -> None:
    model = tiny_model(kind)
    path = make_gguf(tmp_path / "m.gguf", model, quant, kv_b=kv_b)
    ours = load(tmp_path, ARTICLE + STORED, path)
    attention = ours.model.layers[0].self_attn
    assert isinstance(attention, KDeepseekV2Attention)
    assert (attention.kv_b_proj.split is not None) == (kv_b == "split" and cpu.available()[0])
    expected = logits(model)
    assert (logits(ours) - expected).norm() <= tolerance * expected.norm()
    if quant == "F32":
        assert greedy(ours, 12, PROMPT) == greedy(model, 12, PROMPT)


@pytest.mark.skipif(not cpu.available()[0], reason="needs the CPU kernels")
def test_a_kv_b_in_two_reads_and_saves_as_the_models_one(tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3")
    path = make_gguf(tmp_path / "m.gguf", model, kv_b="split")
    projection = load(tmp_path, ARTICLE + STORED, path).model.layers[0].self_attn.kv_b_proj
    original = model.model.layers[0].self_attn.kv_b_proj
    assert isinstance(projection, KLatentLinear)
    assert "keys and values stored as F32" in repr(projection)
    assert torch.equal(projection.weight, original.weight)
    assert torch.equal(projection.state_dict()["weight"], original.weight)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(projection(x), original(x), rtol=1e-5, atol=1e-5)


def test_the_weights_of_a_model_in_hand_are_used_as_they_are(tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3")
    expected, tokens = logits(model), greedy(model, 12, PROMPT)
    rules = tmp_path / "rules.yaml"
    rules.write_text(ARTICLE)
    ours = ktopt.apply(rules, model, remap={"cuda": "cpu"}, device="cpu")
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-4)
    assert greedy(ours, 12, PROMPT) == tokens


def test_the_example_writes_what_transformers_writes(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).resolve().parents[1] / "examples" / "absorbed_mla.py"
    runpy.run_path(str(example), run_name="__main__")
    attention, theirs, ours = (line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines())
    assert attention == "KDeepseekV3Attention"
    assert theirs == ours


@pytest.mark.parametrize(("kv_b", "lost"), [
    ("split", "blk.1.attn_k_b.weight"), ("split", "blk.1.attn_v_b.weight"), ("fused", "blk.1.attn_kv_b.weight"),
    ("split", "blk.0.attn_kv_a_mqa.weight"), ("fused", "blk.0.attn_q_b.weight"),
])  # fmt: skip
def test_a_file_that_lacks_a_projection_is_refused_by_name_before_any_work(
    tmp_path: Path, kv_b: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = gguf_fixtures._stored
    monkeypatch.setattr(gguf_fixtures, "_stored", lambda *given: [each for each in written(*given) if each[0] != lost])
    path = make_gguf(tmp_path / "m.gguf", tiny_model("deepseek_v3"), kv_b=kv_b)
    monkeypatch.setattr("ktopt.weights.gguf_source.GGUFSource.read", None)  # no weight is read
    name = "kv_b_proj" if "b.weight" in lost and "_q_" not in lost else lost.split(".")[2].removeprefix("attn_")
    with pytest.raises(KtoptError) as refused:
        load(tmp_path, ARTICLE + STORED, path)
    assert f"layers.{lost[4]}.self_attn.{name.replace('kv_a_mqa', 'kv_a_proj_with_mqa')}" in str(refused.value)
    assert lost.replace("attn_k_b", "attn_kv_b").replace("attn_v_b", "attn_kv_b") in str(refused.value)
