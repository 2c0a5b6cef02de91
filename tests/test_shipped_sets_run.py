"""Rule sets that ship, carried out: those of CPUs on small random models beside transformers, the others on fake tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_fixtures import make_gguf, tiny_model
from shipped_sets import fitted
from small_plans import cut_down

import ktopt
from ktopt.applying.dry_run import dry_run
from ktopt.choosing.sets import shipped_rules

KINDS = {
    "llama/cpu": "llama",
    "mixtral/cpu": "mixtral",
    "qwen3-moe/cpu": "qwen3_moe",
    "qwen3-next/cpu": "qwen3_next",
    "glm-4.5-air/cpu": "glm4_moe",
    "deepseek-v3/cpu": "deepseek_v3",
    "gemma3/cpu": "gemma3_text",
}
TINY = {
    "deepseek-v2-lite": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek-v3": ("deepseek_v3", {}),
    "glm-4.5-air": ("glm4_moe", {"use_qk_norm": False}),
    "llama-3.1-70b": ("llama", {}),
    "mixtral": ("mixtral", {}),
    "qwen3-235b-a22b": ("qwen3_moe", {}),
    "qwen3-next": ("qwen3_next", {}),
}
"""By folder, the tiny model of the kind."""
WITH_CARDS = (
    "deepseek-v2-lite/24gb", "deepseek-v3/2x24gb", "qwen3-235b-a22b/24gb", "glm-4.5-air/2x24gb", "mixtral/24gb",
    "llama-3.1-70b/24gb", "qwen3-next/24gb",
)  # fmt: skip
"""Of each kind of model a set, and of each kind of set."""
TEXT = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("one_thread")
def test_a_set_of_a_cpu_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    model = tiny_model(KINDS[name])
    file = make_gguf(tmp_path / "m.gguf", model)
    made = ktopt.apply(shipped_rules()[name], weights=file)
    assert made.ktopt_plan.errors == ()
    with torch.inference_mode():
        wanted, found = model(TEXT).logits, made(TEXT).logits
    assert float((found - wanted).square().mean().sqrt()) < 1e-2 * float(wanted.std())  # keys and values are in float16


@pytest.mark.parametrize("name", WITH_CARDS)
def test_a_set_with_cards_runs_on_fake_ones_with_all_the_transfers_that_it_needs(name: str) -> None:
    kind, changes = TINY[name.partition("/")[0]]
    plan = fitted(name).plan
    assert plan is not None
    assert len(plan.devices) == fitted(name).shipped.cards[0] + 1
    dry_run(cut_down(plan, kind, changes))
