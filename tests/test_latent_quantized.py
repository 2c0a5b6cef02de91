"""Latent attention over a kv_b_proj in a few bits: it computes with the numbers that the op makes of the weight, and is as precise
as they are.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_latent_attention import PROMPT, logits, original, replaced
from test_low_bit import made
from transformers import DynamicCache

import ktopt
from ktopt.operators.modules.linear_cuda import Float8Linear, Int4Linear, Int8Linear, LowBitLinear
from ktopt.source import SourceFile

SIZES = {"kv_lora_rank": 64}
PIECES = [17, 5, 1, 1, 14, 1, 1]
COSTS = {Int4Linear: (0.05, 0.5), Int8Linear: (0.001, 0.03), Float8Linear: (0.005, 0.1)}
"""Of the logits, at least and at most, beside a float weight."""
RULES = """
- match: {name: "^model\\\\.layers\\\\..*$", class: torch.nn.Linear}
  replace: {class: KTransformersLinear, kwargs: {generate_device: cuda, generate_op: KLinearMarlin}}
- match: {name: "self_attn$"}
  replace: {class: KDeepseekV2Attention, kwargs: {generate_device: cuda, absorb_for_prefill: true}}
"""


def with_projections(model: Any, make: Any) -> Any:
    """A copy whose kv_b_proj are what `make` makes of their weights."""
    copied = copy.deepcopy(model)
    for layer in copied.model.layers:
        layer.self_attn.kv_b_proj = make(layer.self_attn.kv_b_proj)
    return copied


def rounded(cls: type[LowBitLinear], projection: torch.nn.Linear) -> torch.nn.Linear:
    """A projection in float whose weight is what the op's numbers are."""
    copied = copy.deepcopy(projection)
    copied.weight = torch.nn.Parameter(made(cls, projection.weight.detach(), "cpu").numbers().float(), requires_grad=False)
    return copied


@pytest.mark.parametrize("cls", COSTS)
@pytest.mark.parametrize("absorb", [True, False, "auto"])
def test_a_projection_in_a_few_bits_costs_their_precision_and_no_more(cls: type[LowBitLinear], absorb: Any) -> None:
    model = original("v3", **SIZES)
    ours = with_projections(
        replaced(model, absorb_for_prefill=absorb, chunk_size=19), lambda p: made(cls, p.weight.detach(), "cpu")
    )
    cache = DynamicCache()
    found = torch.cat([logits(ours, piece, cache) for piece in PROMPT.split(PIECES, dim=1)], dim=1)
    same = logits(with_projections(model, lambda p: rounded(cls, p)), PROMPT)
    plain = logits(model, PROMPT)
    assert (found - same).norm() < 0.02 * same.norm()  # expanded, the op computes with activations of its own precision
    least, most = COSTS[cls]
    assert least < (found - plain).norm() / plain.norm() < most


def test_a_rule_that_packs_kv_b_proj_makes_a_plan_without_errors() -> None:
    plan = ktopt.compile(SourceFile("rules.yaml", RULES), "deepseek-v3")
    assert not plan.errors
    step = plan.by_path["model.layers.4.self_attn.kv_b_proj"]
    assert (step.operator, step.kwargs["generate_op"]) == ("KTransformersLinear", "KLinearMarlin")
