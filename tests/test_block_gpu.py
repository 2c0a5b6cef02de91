"""A blocked cache on a GPU: on a pretended device, which refuses a mix of devices as a GPU does, what it attends to is torch's own
attention; with FlashInfer's stand-in, and by torch where FlashInfer can't compute it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocked_models import ANCHORS, OneLayer, blocked
from flashinfer_stand_in import BatchDecodeWithPagedKVCacheWrapper
from layer_fixtures import random_model
from pretend_device import DEVICE, PretendDevice
from transformers import DynamicCache

from ktopt.cache.blocks.layout import BlockLayout
from ktopt.config import CacheSettings
from ktopt.diagnostics import KtoptError
from ktopt.kernels.cuda import blocks as cuda_blocks
from ktopt.operators.modules.block_attention import attend_blocks
from ktopt.operators.modules.block_device import pool_bytes
from ktopt.operators.modules.block_prefix import Prefixes
from ktopt.operators.modules.dynamic_latent import LatentBlocks

KINDS = [("FP16", 2e-3), ("BF16", 3e-2), ("Q8_0", 3e-2)]


@pytest.fixture(autouse=True)
def pretended() -> Iterator[None]:
    with torch.no_grad(), PretendDevice():
        yield


@pytest.fixture(params=["flashinfer", "torch"])
def wrappers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any] | None:
    """The wrappers of FlashInfer that were made; None where torch computes."""
    made: list[Any] = []
    if request.param == "torch":
        return None

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(BatchDecodeWithPagedKVCacheWrapper(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(cuda_blocks, "wrapper_class", lambda: make)
    monkeypatch.setattr(
        cuda_blocks, "refuses", lambda device, key_dim, value_dim, dtype: "" if dtype in cuda_blocks.DTYPES else "no"
    )
    return made


class OnGpu(OneLayer):
    """A cache's layer on the pretended device."""

    def __init__(self, memory: CacheSettings | None = None, **settings: Any) -> None:
        super().__init__(**{"dim": 64, "group": 3, **settings})
        if memory is not None:
            self.shared.memory = memory

    def give_there(self, tokens: int, starts_B: torch.Tensor | None = None) -> tuple[list[torch.Tensor], torch.Tensor]:
        batch, heads, dim = self.shape
        states = tuple(self.numbers(batch, heads, tokens, dim) for _ in range(2))
        self.keys, self.values = (torch.cat(pair, 2) for pair in zip((self.keys, self.values), states, strict=True))
        query = self.numbers(batch, heads * self.group, tokens, dim)
        moved = tuple(each.to(DEVICE) for each in states)
        starts = None if starts_B is None else starts_B.to(DEVICE)
        made = [attend_blocks(layer, query.to(DEVICE), moved, self.scale, starts) for layer in self.layers]
        assert all(each.device == DEVICE for each in made)
        return [each.cpu() for each in made], query


def test_tensors_of_two_devices_do_not_meet() -> None:
    there = torch.ones(2, 3, device=DEVICE)
    assert (there * 2)[:, 1:].sum().item() == 8
    with pytest.raises(RuntimeError, match="meta and cpu"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError):
        there.numpy()


@pytest.mark.parametrize(("kv_type", "off"), KINDS)
def test_prompts_and_tokens_after_them_are_full_attention_where_the_budget_is_all(
    kv_type: str, off: float, wrappers: list[Any] | None
) -> None:
    one = OnGpu(layers=2, block_size=32, local_windows_len=32, kv_type=kv_type)
    for tokens in (150, 1, 20, 1):
        made, query = one.give_there(tokens)
        for each in made:
            torch.testing.assert_close(each, one.dense(query, one.causal(tokens)), rtol=off, atol=off)
    counts = one.shared.statistics
    assert one.layers[0].middle > 1
    assert counts.hits_device >= counts.hits_host > 0
    assert counts.device_bytes == 2 * one.layers[0].rows * one.layers[0].middle * 32 * 128 * 2 < counts.device_budget_bytes
    assert wrappers is None or wrappers


@pytest.mark.parametrize("anchor_type", ANCHORS)
def test_a_small_budget_chooses_what_the_cpu_chooses(anchor_type: str) -> None:
    given = {"anchor_type": anchor_type, "second_select_num": 2, "block_size": 32, "local_windows_len": 32, "kv_type": "FP16"}
    there, here = OnGpu(dim=64, batch=2, **given), OneLayer(dim=64, group=3, batch=2, **given)
    for tokens in (230, 1, 1):
        (made,), _ = there.give_there(tokens)
        (wanted,), _ = here.give(tokens)
        torch.testing.assert_close(made, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", ["SEPARATE", "SHARED"])
@pytest.mark.parametrize("prefill", ["exact", "sparse"])
def test_preselection_shared_choices_and_sparse_prompts_are_the_cpus_too(mode: str, prefill: str) -> None:
    given = {
        "anchor_type": "DYNAMIC", "second_select_num": 2, "block_size": 32, "local_windows_len": 32, "kv_type": "FP16",
        "head_select_mode": mode, "prefill": prefill, "preselect_block": True, "preselect_block_count": 4,
    }  # fmt: skip
    there, here = OnGpu(dim=64, **given), OneLayer(dim=64, group=3, **given)
    for tokens in (320, 1, 33, 1):
        (made,), _ = there.give_there(tokens)
        (wanted,), _ = here.give(tokens)
        torch.testing.assert_close(made, wanted, rtol=2e-2, atol=2e-2)


def test_padding_is_not_seen(wrappers: list[Any] | None) -> None:
    one = OnGpu(batch=3, block_size=32, local_windows_len=32, kv_type="FP16")
    starts = torch.tensor([0, 45, 100])
    for tokens in (180, 1, 1):
        (made,), query = one.give_there(tokens, starts)
        seen = one.causal(tokens) & (torch.arange(one.keys.shape[2]) >= starts[:, None, None, None])
        real = torch.arange(one.keys.shape[2] - tokens, one.keys.shape[2]) >= starts[:, None]
        torch.testing.assert_close(made[real], one.dense(query, seen)[real], rtol=2e-3, atol=2e-3)


def test_a_pool_smaller_than_the_context_is_gone_through_in_pieces(wrappers: list[Any] | None) -> None:
    given = {"block_size": 32, "local_windows_len": 32, "kv_type": "FP16", "second_select_num": 2, "dense_layer_num": 1}
    layout, rows, probe = BlockLayout(32, 64, 64, "F16"), 2, OnGpu(**given).shared
    parts, reserved = rows * probe.most_middle, probe._reserved_bytes(rows, layout)
    budget = reserved + pool_bytes(layout, parts) - (parts - 10) * layout.nbytes
    one = OnGpu(CacheSettings(gpu_memory_size_GB=budget / 1e9, cpu_memory_size_GB=0.1), **given)
    (made,), query = one.give_there(400)
    assert one.shared.gpu.pool.slots == 10 < rows * one.layers[0].middle
    torch.testing.assert_close(made, one.dense(query, one.causal(400)), rtol=2e-3, atol=2e-3)
    (made,), query = one.give_there(1)
    torch.testing.assert_close(made, one.dense(query, one.causal(1)), rtol=2e-3, atol=2e-3)
    assert one.shared.gpu.pool.statistics.evictions > 0


def test_cropped_tokens_are_forgotten_there_too() -> None:
    one = OnGpu(block_size=32, local_windows_len=32, kv_type="FP16")
    one.give_there(250)
    one.give_there(1)
    one.layers[0].crop(-101)
    one.keys, one.values = one.keys[:, :, :150], one.values[:, :, :150]
    for tokens in (90, 1):
        (made,), query = one.give_there(tokens)
        torch.testing.assert_close(made, one.dense(query, one.causal(tokens)), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("anchor_type", ["QUEST", "KEY_INT4"])
def test_a_cache_begins_with_blocks_of_an_earlier_prompt(anchor_type: str, tmp_path: Path) -> None:
    given = {"block_size": 32, "local_windows_len": 32, "kv_type": "FP16", "anchor_type": anchor_type, "second_select_num": 2}
    disk = CacheSettings(disk_path=str(tmp_path), prefix_reuse=True, cpu_memory_size_GB=0.1)
    ids, made = list(range(300)), []
    for taken in (0, 256):
        one = OnGpu(disk, **given)
        cache = DynamicCache()
        prefixes = Prefixes(cache, one.shared, str(tmp_path), "a model", 2, (64, 64), DEVICE)
        assert prefixes.restore(ids) == taken
        one.layers = list(cache.layers)
        states = [torch.randn(1, 2, 301, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE) for seed in (1, 2)]
        query = torch.randn(1, 6, 301, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        for first, end in ((taken, 300), (300, 301)):
            part = [each[:, :, first:end] for each in states]
            found = attend_blocks(one.layers[0], query[:, :, first:end], tuple(part), one.scale, None)
        made.append(found.cpu())
        prefixes.keep([*ids, 0])
        one.shared.close()
    torch.testing.assert_close(made[0], made[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("select", [64, 1])
def test_latents_are_attended_to_there_as_on_the_cpu(select: int) -> None:
    model = blocked(random_model("deepseek_v3"), kv_type="FP16", block_size=16, local_windows_len=16, second_select_num=select)
    here = model.model.layers[0].self_attn
    x = torch.randn(1, 200, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    turns = model.model.rotary_emb(x, torch.arange(200).unsqueeze(0))

    def attended(attention: torch.nn.Module, x: torch.Tensor, *turns: torch.Tensor) -> torch.Tensor:
        cache, made = DynamicCache(config=model.config), []
        for part in (slice(0, 197), *(slice(at, at + 1) for at in range(197, 200))):
            embeddings = tuple(each[:, part] for each in turns)
            made.append(attention(x[:, part], position_embeddings=embeddings, past_key_values=cache)[0])
        assert isinstance(cache.layers[0], LatentBlocks)
        assert cache.layers[0].middle > 1
        return torch.cat(made, dim=1)

    wanted = attended(here, x, *turns)
    for module in here.modules():
        module._parameters.update({name: each.detach().to(DEVICE) for name, each in module._parameters.items() if each is not None})
    made = attended(here, *(each.to(DEVICE) for each in (x, *turns)))
    assert made.device == DEVICE
    torch.testing.assert_close(made.cpu(), wanted, rtol=2e-3, atol=2e-3)


def test_budgets_that_do_not_hold_a_step_are_refused_with_the_numbers() -> None:
    one = OnGpu(CacheSettings(gpu_memory_size_GB=0.001, cpu_memory_size_GB=0.1), block_size=32, local_windows_len=32)
    with pytest.raises(KtoptError, match="raise gpu_memory_size_GB"):
        one.give_there(1)
    one = OnGpu(CacheSettings(gpu_memory_size_GB=0.001, gpu_only=True), block_size=32, local_windows_len=32)
    with pytest.raises(KtoptError, match="gpu_only wants all blocks on meta"):
        one.give_there(1)
