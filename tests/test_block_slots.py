"""Blocks as they stand in a GPU's pool are gguf's numbers, in halves; what GPUs compute of blocks in torch meets no other device.

The last is seen without a GPU: torch's fake tensors refuse an operation on tensors of two devices.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch._subclasses.fake_tensor import FakeTensorMode

from ktopt.applying.fake_indexing import IndexWithoutGuard
from ktopt.cache.blocks.layout import ANCHOR_TYPES, KINDS, BlockLayout
from ktopt.kernels import anchors_reference, blocks
from ktopt.kernels.anchors import Anchors
from ktopt.kernels.cuda.slots import SlotSegments, halves
from ktopt.kernels.segments import CacheSegments

T, D = 32, 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_slots_have_ggufs_numbers_in_halves(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    keys, values = torch.randn(3, T, D) * 5, torch.randn(3, T, 2 * D)
    stored = [quants.quantize(each.numpy(), GGMLQuantizationType[kind]) for each in (keys, values)]
    raw = torch.from_numpy(np.concatenate([each.view(np.uint8).reshape(3, -1) for each in stored], 1))
    found = halves(raw, BlockLayout(T, D, 2 * D, kind), dtype)
    wanted = [torch.from_numpy(quants.dequantize(each, GGMLQuantizationType[kind])).to(dtype).flatten(1) for each in stored]
    assert found.dtype == dtype
    assert torch.equal(found, torch.cat(wanted, 1))


def test_bytes_that_fill_blocks_up_are_left_out() -> None:
    layout = BlockLayout(1, 32, 32, "Q8_0")
    assert layout.nbytes > 2 * 34
    keys, values = torch.randn(2, 1, 32), torch.randn(2, 1, 32)
    found = halves(blocks.pack(keys, values, layout), layout)
    torch.testing.assert_close(found.float(), torch.cat([keys, values], 2)[:, 0], rtol=0, atol=0.03)


def test_latents_are_keys_alone() -> None:
    layout = BlockLayout(T, 96, D, "F16", shared=True)
    keys = torch.randn(2, T, 96).half()
    assert torch.equal(halves(blocks.pack(keys, None, layout), layout), keys.flatten(1))


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """A GPU whose tensors have no numbers."""
    with FakeTensorMode(), IndexWithoutGuard():
        yield torch.device("cuda:0")


def test_fake_tensors_of_two_devices_do_not_meet(cuda: torch.device) -> None:
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        torch.ones(3, device=cuda) + torch.ones(3)


@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("anchor_type", ANCHOR_TYPES)
def test_anchors_are_made_and_scored_on_the_gpu_alone(anchor_type: str, masked: bool, shared: int, cuda: torch.device) -> None:
    anchors = Anchors(anchor_type, 2, 6, 12, T, D, device=cuda)
    keys, importance = torch.randn(6, 10, T, D, device=cuda), torch.rand(6, 10, T, device=cuda)
    anchors_reference.add(anchors.storage, 0, keys, importance)
    anchors.blocks = 10
    query = torch.randn(6, 3, D, device=cuda)
    allowed = torch.ones(6, 10, dtype=torch.bool, device=cuda) if masked else None
    scores = anchors.scores(query, 0.1, 2, shared=shared, allowed_RM=allowed)
    assert scores.device == cuda
    assert scores.shape == (6, 10)
    if not masked:  # how many may be chosen is a number, which fakes haven't
        picks = anchors.select(query, 0.1, 2, shared=shared)
        assert picks.device == cuda
        assert picks.shape == (6, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_become_halves_on_the_gpu_alone(kind: str, cuda: torch.device) -> None:
    layout = BlockLayout(T, D, D, kind)
    made = halves(torch.zeros(5, layout.nbytes, dtype=torch.uint8, device=cuda), layout)
    assert (made.device, made.dtype, made.shape) == (cuda, torch.float16, (5, 2 * T * D))


@pytest.mark.parametrize("padded", [False, True])
def test_torch_attends_to_slots_and_the_window_on_the_gpu_alone(padded: bool, cuda: torch.device) -> None:
    pool = torch.zeros(9, 2 * T * D, dtype=torch.float16, device=cuda)
    slots = torch.zeros(3, 4, dtype=torch.int32, device=cuda)
    keys, values = (torch.zeros(3, 64, D, dtype=torch.float16, device=cuda) for _ in range(2))
    parts = [
        SlotSegments(pool, slots, T, D, torch.zeros(3, 4, dtype=torch.int64) if padded else None),
        CacheSegments(keys, values, 7, 50, torch.zeros(3, 1, dtype=torch.int64) if padded else None),
    ]
    out, log_sum = blocks.attend_reference(torch.zeros(3, 2, D, device=cuda), parts, value_dim=D, scale=0.1)
    assert (out.device, out.shape, log_sum.shape) == (cuda, (3, 2, D), (3, 2))
