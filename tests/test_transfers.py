"""Transfers at run time, on fake tensors with the plan's real device names: those of the plan suffice, and none is spare."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from apply_fixtures import KINDS, PROMPT, cut, hand_plan, make_model, source_of
from gguf_fixtures import tiny_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

import ktopt
from ktopt.applying import apply_plan
from ktopt.applying.dry_run import dry_run
from ktopt.applying.fake_indexing import get_item, set_item
from ktopt.applying.hooks import Copies, install_transfers
from ktopt.diagnostics import KtoptError
from ktopt.plan import Transfer
from ktopt.transfers import derive_transfers
from ktopt.trees import graph_from_module

SHARED = Path(__file__).resolve().parents[2] / "shared"
EXPERTS = ("KTransformersExperts", {"generate_op": "KExpertsTorch", "prefill_op": "KExpertsTorch"})
LAYERS = {"": "cuda:0", "model.layers.1": "cuda:1", "model.layers.2": "cuda:1", "model.norm": "cuda:1", "lm_head": "cuda:1"}
PLACEMENTS = {
    "layers on two GPUs": LAYERS,
    "the head back on the first": {**LAYERS, "lm_head": "cuda:0"},
    "an MLP on the CPU": {"": "cuda:0", "model.layers.1.mlp": "cpu"},
    "attention on another GPU": {**LAYERS, "model.layers.2.self_attn": "cuda:2"},
    "the embedding on the CPU": {"": "cuda:0", "model.embed_tokens": "cpu"},
    "the rotary embedding elsewhere": {"": "cuda:0", "model.rotary_emb": "cuda:1"},
    "a norm elsewhere": {"": "cuda:0", "model.layers.1.post_attention_layernorm": "cuda:1"},
    "a projection elsewhere": {"": "cuda:0", "model.layers.1.self_attn.o_proj": "cpu"},
}


def two_device_plan(kind: str, devices: dict[str, str], operators=None):
    model = make_model(kind)
    plan = hand_plan(model, devices=devices, operators=operators)
    return replace(plan, transfers=derive_transfers(graph_from_module(model), plan.steps))


def lacks_a_transfer(plan) -> bool:
    try:
        dry_run(plan)
    except KtoptError as error:
        if "lacks a transfer" not in str(error):
            raise
        return True
    return False


CASES = [(placement, "llama") for placement in PLACEMENTS]
CASES += [("layers on two GPUs", kind) for kind in KINDS if kind != "llama"]
CASES += [("an MLP on the CPU", "deepseek_v3"), ("attention on another GPU", "deepseek_v3")]


@pytest.mark.parametrize(("placement", "kind"), CASES)
def test_the_derived_transfers_suffice_and_none_is_spare(placement, kind):
    plan = two_device_plan(kind, PLACEMENTS[placement])
    dry_run(plan)
    for index, transfer in enumerate(plan.transfers):
        assert lacks_a_transfer(replace(plan, transfers=cut(plan.transfers, index))), transfer


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_on_the_cpu_are_reached_and_answered(kind):
    layers = [f"model.layers.{i}.mlp.experts" for i in (1, 2)]
    operators = dict.fromkeys(layers, EXPERTS)
    plan = two_device_plan(kind, {**LAYERS, **dict.fromkeys(layers, "cpu")}, operators)
    dry_run(plan)
    sides = {(t.path, t.side) for t in plan.transfers}
    assert {(path, side) for path in layers for side in ("input", "output")} <= sides
    for index, transfer in enumerate(plan.transfers):
        assert lacks_a_transfer(replace(plan, transfers=cut(plan.transfers, index))), transfer


def upstream_plan(file: str, kind: str, layers: int):
    """A real multi-device rule file on a tiny model of as many layers as it was written for."""
    path = SHARED / "cases" / "upstream_rules" / file
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    with torch.device("meta"):
        model = tiny_model(kind, num_hidden_layers=layers)
    return ktopt.compile(path, model)


@pytest.mark.parametrize(
    ("file", "kind", "layers"),
    [
        ("DeepSeek-V3-Chat-multi-gpu-4.yaml", "deepseek_v3", 61),
        ("DeepSeek-V2-Lite-Chat-multi-gpu.yaml", "deepseek_v2", 27),
        ("Mixtral.yaml", "mixtral", 32),
        ("npu/Qwen3-Chat-300IA2-npu-serve.yaml", "qwen3_moe", 48),
    ],
)
def test_a_real_rule_file_has_the_transfers_that_it_needs(file, kind, layers):
    plan = upstream_plan(file, kind, layers)
    assert len(plan.devices) > 1
    dry_run(plan)


def test_a_real_rule_file_without_one_transfer_fails():
    plan = upstream_plan("DeepSeek-V2-Lite-Chat-multi-gpu.yaml", "deepseek_v2", 27)
    for index in random.Random(0).sample(range(len(plan.transfers)), 4):
        assert lacks_a_transfer(replace(plan, transfers=cut(plan.transfers, index))), plan.transfers[index]


def test_a_device_that_torch_does_not_know_is_named_as_the_plan_does():
    plan = two_device_plan("llama", {"": "cuda:0", "model.layers.1": "npu:1"})
    dry_run(plan)
    with pytest.raises(KtoptError, match=r"cuda:0 and npu:1"):
        dry_run(replace(plan, transfers=()))


def test_a_missing_transfer_is_blamed_on_the_module_where_devices_meet():
    plan = two_device_plan("llama", LAYERS)
    first = next(i for i, t in enumerate(plan.transfers) if t.path == "model.layers.1")
    with pytest.raises(KtoptError, match=r"model\.layers\.1\..*cuda:0 and cuda:1"):
        dry_run(replace(plan, transfers=cut(plan.transfers, first)))


def test_a_plan_for_one_device_runs_without_transfers():
    dry_run(two_device_plan("llama", {"": "cuda:3"}))


def test_transfers_to_where_a_model_is_already_change_nothing():
    model = make_model("mixtral")
    transfers = (Transfer("model.layers.1", "input", "cpu", "cpu"), Transfer("model.layers.1.mlp", "output", "cpu", "cpu"))
    made = apply_plan(hand_plan(model, transfers=transfers), weights=source_of(model))
    assert torch.equal(made(PROMPT).logits, model(PROMPT).logits)


def test_a_tensor_that_many_layers_take_is_copied_once_a_device():
    copies = Copies()
    with FakeTensorMode():
        mask = torch.ones(1, 1, 4, 4, device="cuda:0")
        first, second = copies.on(mask, torch.device("cuda:1")), copies.on(mask, torch.device("cuda:1"))
        other = copies.on(mask, torch.device("cuda:2"))
    assert first is second
    assert (first.device.index, other.device.index) == (1, 2)


def test_a_tensor_changed_in_place_is_copied_again():
    copies = Copies()
    tensor = torch.zeros(2)
    meta = torch.device("meta")
    first = copies.on(tensor, meta)
    tensor.add_(1)
    assert copies.on(tensor, meta) is not first


def test_copies_are_forgotten_with_their_source():
    copies = Copies()
    tensor = torch.zeros(2)
    copies.on(tensor, torch.device("meta"))
    assert len(copies._known) == 1
    del tensor
    assert len(copies._known) == 0


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("target", "waits"), [("cpu", True), ("cuda:1", False), ("xpu:0", False)])
def test_a_copy_to_the_host_is_waited_for_and_one_to_an_accelerator_is_not(target, waits, inference):
    """The host would otherwise read memory that the copy hasn't reached yet."""
    asked = []

    class Recording:
        device, _version = torch.device("cuda:0"), 0

        def is_inference(self):
            return inference

        def to(self, device, non_blocking=False):
            asked.append((str(device), non_blocking))
            return self

    copies = Copies()
    copies._known = {}
    copies.on(Recording(), torch.device(target))
    assert asked == [(target, not waits)]


def test_inference_tensors_are_moved_too():
    with torch.inference_mode():
        assert Copies().on(torch.zeros(2), torch.device("meta")).is_meta


def test_moving_reaches_into_nested_values_and_leaves_caches_alone():
    cache = DynamicCache()
    tensor = torch.zeros(2)
    moved = Copies().move({"a": [tensor, (tensor, None)], "cache": cache, "n": 3}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["cache"] is cache
    assert moved["n"] == 3


def test_hooks_move_what_enters_and_what_leaves():
    class Doubles(nn.Module):
        def forward(self, x, *, scale):
            self.seen = (x.device.type, scale.device.type)
            return (x, {"scale": scale})

    root = nn.Module()
    root.block = Doubles()
    plan = replace(
        hand_plan(make_model()),
        transfers=(
            Transfer("block", "input", "cpu", "meta"),
            Transfer("block", "output", "meta", "meta"),
            Transfer("gone", "input", "a", "cpu"),
        ),
    )
    handles = install_transfers(root, plan)
    x, rest = root.block(torch.zeros(1), scale=torch.ones(1))
    assert root.block.seen == ("meta", "meta")
    assert (x.device.type, rest["scale"].device.type) == ("meta", "meta")
    assert len(handles) == 2
    for handle in handles:
        handle.remove()
    assert root.block(torch.zeros(1), scale=torch.ones(1))[0].device.type == "cpu"


KEYS = [
    0, -1, (0, 1), (slice(None), None), (..., slice(0, 2)), (None, ..., -1), (slice(1, None), slice(None, -1)), (0, ..., None),
    torch.tensor([1, 0]), (torch.tensor([0, 1]), torch.tensor([0, 1])), (slice(None), torch.tensor([0, 2])), (slice(None), [0, 1]),
    (slice(None), torch.rand(3, 4) > 0.5), torch.rand(2, 3, 4, 5) > 0.5, slice(None, None, 2),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_indexing_without_a_device_guard_is_torchs_indexing(key):
    tensor = torch.arange(120).reshape(2, 3, 4, 5)
    assert torch.equal(get_item(tensor, key), tensor[key])
    theirs, ours = tensor.clone(), tensor.clone()
    theirs[key] = 7
    set_item(ours, key, 7)
    assert torch.equal(ours, theirs)
