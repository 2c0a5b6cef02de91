"""The bytes that a picture says a token moves are those that the hooks copy, on fake tensors of the plan's devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from apply_fixtures import hand_plan, make_model

from ktopt.applying import hooks
from ktopt.applying.dry_run import PREFILL_TOKENS, dry_run
from ktopt.folded import fold_plan
from ktopt.picture.edges import edges_of
from ktopt.transfers import derive_transfers
from ktopt.trees import graph_from_module

LAYERS = {"": "cuda:0", "model.layers.1": "cuda:1", "model.layers.2": "cuda:1", "model.norm": "cuda:1", "lm_head": "cuda:1"}
EXPERTS = ("KTransformersExperts", {"generate_op": "KExpertsTorch", "prefill_op": "KExpertsTorch"})
FORWARDS = PREFILL_TOKENS + 1
PARTS = {"": "cuda:0", "model.layers.2.mlp": "cuda:1"} | {
    f"model.layers.1.{name}": "cpu" for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
}
CASES = {
    "parts of layers elsewhere": ("llama", PARTS),
    "layers there and back": ("llama", {**LAYERS, "model.layers.2": "cuda:0"}),
    "attention elsewhere": ("qwen3_moe", {**LAYERS, "model.layers.0.self_attn": "cuda:2", "model.layers.2.self_attn": "cuda:2"}),
    "a router elsewhere": ("mixtral", {"": "cuda:0", "model.layers.1.mlp.gate": "cpu"}),
    "two kinds of positions": ("gemma3_text", LAYERS),
    "latent attention": ("deepseek_v3", {"": "cuda:0", "model.layers.1.self_attn": "cuda:1"}),
}


def copied_bytes(plan: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that the hooks copied while a prompt and one token passed, but for masks."""
    moved: list[int] = []
    real = hooks._copied

    def counting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.dim() < 4:  # masks are (batch, 1, queries, keys)
            moved.append(tensor.numel() * tensor.element_size())
        return real(tensor, device)

    monkeypatch.setattr(hooks, "_copied", counting)
    dry_run(plan)
    return sum(moved)


def said_bytes(plan: Any, graph: Any) -> int:
    sizes = [edge.nbytes for edge in edges_of(plan, fold_plan(plan), graph)]
    assert None not in sizes
    return sum(size or 0 for size in sizes)


@pytest.mark.parametrize("case", CASES)
def test_a_token_moves_what_the_picture_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, devices = CASES[case]
    model = make_model(kind)
    graph = graph_from_module(model)
    plan = hand_plan(model, devices=devices)
    plan = replace(plan, transfers=derive_transfers(graph, plan.steps))
    assert plan.transfers
    assert copied_bytes(plan, monkeypatch) == FORWARDS * said_bytes(plan, graph)


def test_experts_fetch_the_routers_choice_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("deepseek_v3")
    graph = graph_from_module(model)
    experts = [module.path for module in graph.modules if module.role == "experts"]
    plan = hand_plan(model, devices={"": "cuda:0", **dict.fromkeys(experts, "cpu")}, operators=dict.fromkeys(experts, EXPERTS))
    plan = replace(plan, transfers=derive_transfers(graph, plan.steps))
    assert copied_bytes(plan, monkeypatch) == FORWARDS * said_bytes(plan, graph)
