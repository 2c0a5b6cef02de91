"""Attention of a decode step to blocks of a long cache on a GPU: by FlashInfer's BatchDecodeWithPagedKVCacheWrapper, else by torch.

A row (a KV head of a sequence) is a request with one KV head and the row's query heads, so that each row has blocks of its own. The
pool of blocks and the buffers of unquantised tokens are memories of their own, so each is a call, and the results are merged by the
logarithms of their softmax's sums.

FlashInfer plans a call before it runs it: for how many pages each row has, and not for which. So the layers of a step share a plan,
and so do steps, as long as the numbers of pages stay. Which pages they are is written into a fixed buffer on the device, as for a
captured CUDA graph. Arguments are those that versions 0.6 and 0.7 share.

Legend: R rows, H query heads of a row, D numbers of a key, V of a value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, cast

import torch

from ktopt.kernels import blocks
from ktopt.kernels.cuda.flashinfer import WORKSPACE_BYTES, refuses_device
from ktopt.kernels.cuda.pages import Pages, pages_of
from ktopt.kernels.cuda.slots import SlotSegments
from ktopt.kernels.segments import CacheSegments, Segments

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
"""Numbers of a key and a value that the kernels are made for."""
DTYPES = (torch.float16, torch.bfloat16)
LEAST_ROOM = 1024
"""Pages that a buffer of indices has room for from the beginning."""


def wrapper_class() -> Any:
    """FlashInfer's wrapper. ImportError where it isn't installed."""
    return import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper


@cache
def refuses(device: torch.device, key_dim: int, value_dim: int, dtype: torch.dtype) -> str:
    """Why FlashInfer can't compute attention to keys and values of these sizes, or ""."""
    if reason := refuses_device(device):
        return reason
    if key_dim != value_dim or key_dim not in HEAD_DIMS:
        return f"it takes keys and values of equally many numbers, {HEAD_DIMS}, not {key_dim} and {value_dim}"
    return "" if dtype in DTYPES else f"it takes float16 and bfloat16, not {dtype}"


def refuses_part(device: torch.device, part: SlotSegments | CacheSegments, value_dim: int) -> str:
    """Why FlashInfer can't compute attention to this part of a context, or ""."""
    latents = "it takes no values that are parts of keys (latents)"
    if isinstance(part, SlotSegments):
        return refuses(device, part.key_dim, value_dim, part.pool_SN.dtype) if part.stored_value_dim else latents
    keys, values = part.keys_RCD, part.values_RCV
    if values is None:
        return latents
    if keys.stride() != values.stride() or keys.stride()[1:] != (keys.shape[2], 1) or keys.stride(0) % keys.shape[2]:
        return "keys and values of the window lie in memory in different ways"
    return refuses(device, keys.shape[2], value_dim, keys.dtype)


class BlockAttention:
    """Attention on one device, of all layers of a cache: it has the plans and buffers of a cache, and is kept with it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._calls: dict[tuple[int, int], _Call] = {}
        self._workspace: torch.Tensor | None = None

    @property
    def plans(self) -> int:
        """How often FlashInfer has planned."""
        return sum(call.plans for call in self._calls.values())

    def attend(
        self, q_RHD: torch.Tensor, segments: Sequence[SlotSegments | CacheSegments], *, value_dim: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """softmax(q @ keys.T * scale) @ values over all that each row's segments hold, float32 (R, H, V), and the natural logarithm
        of each softmax's sum (R, H). A row that sees nothing gives zeros and -inf.

        q is floating point. Segments at the same place of the list should be of the same memories in all layers, as plans are kept
        by it. Where FlashInfer can't compute them all torch does, in float32, and the log says why, once.
        """
        for part in segments:
            if reason := refuses_part(self.device, part, value_dim):
                _say(self.device.type, reason)
                parts = cast("Sequence[Segments]", segments)
                return blocks.attend_reference(q_RHD.float(), parts, value_dim=value_dim, scale=scale)
        found = [
            self._call(at, len(q_RHD)).run(q_RHD, pages, scale) for at, part in enumerate(segments) if (pages := pages_of(part))
        ]
        if found:
            return blocks.merge(found)
        nothing = torch.zeros(*q_RHD.shape[:2], value_dim, device=q_RHD.device)
        return nothing, torch.full(q_RHD.shape[:2], -math.inf, device=q_RHD.device)

    def _call(self, at: int, rows: int) -> _Call:
        if (at, rows) not in self._calls:
            with torch.inference_mode(False):
                if self._workspace is None:
                    self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
                self._calls[at, rows] = _Call(self._workspace, rows)
        return self._calls[at, rows]


class _Call:
    """A wrapper, and what it was planned for last. All calls of a stream may have one workspace: it holds nothing between runs."""

    def __init__(self, workspace: torch.Tensor, rows: int) -> None:
        self._workspace, self._rows = workspace, rows
        self._wrapper: Any = None
        self._indices = torch.empty(0, dtype=torch.int32)
        self._planned: Any = None
        self._content: Any = None
        self.plans = 0

    def run(self, q_RHD: torch.Tensor, pages: Pages, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Out, float32 (R, H, V), and the natural logarithm of each softmax's sum (R, H)."""
        self._plan(pages, q_RHD.shape[1], scale)
        query = q_RHD.to(pages.keys.dtype).contiguous()
        out, log2_sum = self._wrapper.run(query, (pages.keys, pages.values), return_lse=True)
        out, log_sum = out.float(), log2_sum * math.log(2)
        if pages.empty_R:
            empty = torch.tensor([row in pages.empty_R for row in range(self._rows)]).to(q_RHD.device)[:, None]
            out, log_sum = out.masked_fill(empty[..., None], 0), log_sum.masked_fill(empty, -math.inf)
        return out, log_sum

    def _plan(self, pages: Pages, heads: int, scale: float) -> None:
        _, tokens, _, dim = pages.keys.shape
        wanted = pages.counts_R, pages.last_R, tokens, heads, dim, pages.keys.dtype, scale
        same = wanted == self._planned
        if same and pages.content is not None and pages.content == self._content:
            return
        indices = pages.indices()
        self._content = pages.content
        if same:
            self._indices[: len(indices)].copy_(indices)
            return
        if self._wrapper is None or len(indices) > len(self._indices):
            self._make(len(indices))
        self._planned = None  # should planning fail
        self._wrapper.plan(
            indptr=torch.tensor([0, *pages.counts_R], dtype=torch.int32).cumsum(0).int(),
            indices=indices,
            last_page_len=torch.tensor(pages.last_R, dtype=torch.int32),
            num_qo_heads=heads,
            num_kv_heads=1,
            head_dim=dim,
            page_size=tokens,
            q_data_type=pages.keys.dtype,
            kv_data_type=pages.keys.dtype,
            sm_scale=scale,
        )
        self._planned = wanted
        self.plans += 1

    def _make(self, pages: int) -> None:
        """A wrapper with buffers for so many pages and some to come. Tensor cores serve any number of heads."""
        room = max(LEAST_ROOM, 1 << (pages - 1).bit_length())
        with torch.inference_mode(False):
            ends, self._indices, last = (
                torch.zeros(size, dtype=torch.int32, device=self._workspace.device) for size in (self._rows + 1, room, self._rows)
            )
        self._wrapper = wrapper_class()(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=ends,
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=last,
            backend="fa2",
        )


@lru_cache(maxsize=64)
def _say(kind: str, reason: str) -> None:
    log.warning("attention to blocks is computed by torch on %s, not by FlashInfer: %s", kind, reason)
