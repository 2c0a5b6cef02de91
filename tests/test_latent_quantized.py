"""Latent attention over a kv_b_proj that is no plain matrix of numbers: in a few bits, where it computes with the numbers that the
op makes of the weight and is as precise as they are, or a class of somebody else's whose product is more than that of its weight.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_latent_attention import PROMPT, close, logits, original, replaced
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


class Scaled(torch.nn.Linear):
    """A weight in float8 beside its scale, as fine-grained FP8 checkpoints have it."""

    @classmethod
    def of(cls, projection: torch.nn.Linear) -> Scaled:
        made = cls(projection.in_features, projection.out_features, bias=False)
        made.scale = projection.weight.detach().abs().amax() / 448
        made.weight = torch.nn.Parameter((projection.weight.detach() / made.scale).to(torch.float8_e4m3fn), requires_grad=False)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T


class Adapted(torch.nn.Module):
    """A projection and two narrow matrices that add to it, as LoRA has them; its `weight` is the projection's, as in peft."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.gain, self.in_features = base, 1.0, base.in_features
        generator = torch.Generator().manual_seed(3)
        self.down = torch.nn.Parameter(torch.randn(4, base.in_features, generator=generator) * 0.2, requires_grad=False)
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 4, generator=generator) * 0.5, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T * self.gain


def called_otherwise(projection: torch.nn.Linear) -> torch.nn.Linear:
    """Its forward replaced on the instance, as accelerate's hooks do."""
    copied = copy.deepcopy(projection)
    copied.forward = lambda x: torch.nn.functional.linear(x, copied.weight * 1.5)  # type: ignore[method-assign]
    return copied


@pytest.mark.parametrize("make", [Scaled.of, Adapted, called_otherwise])
@pytest.mark.parametrize("absorb", [True, False, "auto"])
def test_a_projection_that_computes_more_than_its_weight_counts_with_all_of_it(make: Any, absorb: Any) -> None:
    model = original("v3", **SIZES)
    ours = with_projections(replaced(model, absorb_for_prefill=absorb, chunk_size=19).requires_grad_(False), make)
    cache = DynamicCache()
    found = torch.cat([logits(ours, piece, cache) for piece in PROMPT.split(PIECES, dim=1)], dim=1)
    close(found, logits(with_projections(model, make), PROMPT))


def test_an_adapter_that_is_turned_off_is_not_remembered() -> None:
    model = original("v3", **SIZES)
    ours = with_projections(replaced(model, absorb_for_prefill=True), Adapted)
    logits(ours, PROMPT)
    for layer in ours.model.layers:
        layer.self_attn.kv_b_proj.gain = 0.0
    close(logits(ours, PROMPT), logits(model, PROMPT))


def test_expanded_keys_and_values_may_be_kept_in_another_dtype_than_they_are_computed_in() -> None:
    model = original("v3", **SIZES)
    ours = replaced(copy.deepcopy(model).bfloat16(), decode_cache="expanded", kv_dtype="float32")
    cache, expected = DynamicCache(), logits(model, PROMPT)
    found = torch.cat([logits(ours, piece, cache) for piece in PROMPT.split(PIECES, dim=1)], dim=1).float()
    assert (found - expected).norm() < 2e-2 * expected.norm()
    assert cache.layers[0].expanded.keys.dtype is torch.float32  # type: ignore[attr-defined]
