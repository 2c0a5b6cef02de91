"""Anchors by the CPU kernels (anchors.h): the memory of an anchors_reference.Storage, as the extension takes it.

Legend: R rows, M blocks, K blocks at hand, T tokens of a block, D numbers of a key, H query heads of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktopt.kernels.cpu import _needed, available
from ktopt.weights.ggml_types import BY_NAME

if TYPE_CHECKING:
    import torch

    from ktopt.kernels.anchors_reference import Storage

TYPES = ("BLOCK_MEAN", "BLOCK_MAX", "QUEST", "FIXED", "DYNAMIC", "KEY_INT4")
"""In the order of anchors.h."""
KINDS = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
LARGEST_DIM = 1024


def refuses(storage: Storage) -> str | None:
    """Why the kernels can't compute with these anchors, or None."""
    usable, reason = available()
    if not usable:
        return reason
    if not storage.anchors.is_cpu:
        return f"they lie on {storage.anchors.device}"
    if storage.dim % 16 or storage.dim > LARGEST_DIM:
        return f"the CPU kernels take keys of a multiple of 16 numbers up to {LARGEST_DIM}, not {storage.dim}"
    return None


class AnchorKernels:
    """One layer's anchors as the extension has them. The storage must outlive it, and stay where it is."""

    def __init__(self, storage: Storage) -> None:
        extension = _needed()
        rows, max_blocks, each, dim = storage.anchors.shape
        tensors = (storage.anchors, storage.mean, storage.codes, storage.steps, storage.signs, storage.magnitude)
        self._index = extension.anchors(
            *(TYPES.index(storage.anchor_type), each, rows, max_blocks, storage.tokens, dim), *(t.data_ptr() for t in tensors)
        )
        self.adds = storage.anchor_type not in ("FIXED", "DYNAMIC")
        self._add, self._scores, self._choose = extension.add_anchors, extension.anchor_scores, extension.choose_blocks

    def add(self, first: int, keys_RKTD: torch.Tensor, limit: float, threads: int) -> int:
        """Anchors of blocks `first` to `first` + K, of types that are computed from keys alone (`adds`).

        keys (R, K, T, D) float32, float16 or bfloat16, each token's numbers one after the other. The answer is -1, or the first
        (row * K + block) that has a number beyond `limit` or that is none.
        """
        rows, count, tokens, dim = keys_RKTD.stride()
        if dim != 1:
            raise ValueError(f"keys with strides {keys_RKTD.stride()} don't have a token's numbers together")
        kind = BY_NAME[KINDS[str(keys_RKTD.dtype)]].number
        bad: int = self._add(
            self._index, kind, keys_RKTD.data_ptr(), rows, count, tokens, first, keys_RKTD.shape[1], threads, limit
        )
        return bad

    def scores(
        self,
        blocks: int,
        q_RHD: torch.Tensor,
        scale: float,
        count: int,
        shared: int,
        allowed: int,
        rest: int,
        out_RM: torch.Tensor,
        threads: int,
    ) -> None:
        """Scores of the first `blocks` blocks into `out` (R, blocks) float32. q is float32 and contiguous, `allowed` an address of
        (R, blocks) bytes or 0, `rest` one of (R, H) float32 or 0; a `count` below 0 scores without a shortlist."""
        self._scores(
            self._index, blocks, q_RHD.data_ptr(), q_RHD.shape[1], count, shared, allowed, rest, out_RM.data_ptr(), threads, scale
        )

    def choose(
        self,
        blocks: int,
        q_RHD: torch.Tensor,
        scale: float,
        count: int,
        shared: int,
        allowed: int,
        rest: int,
        out_RK: torch.Tensor,
        threads: int,
    ) -> int:
        """The best blocks, written one row after the other into `out`, int32, room for R rows of `count`. The answer is how many
        there are in each row."""
        chosen: int = self._choose(
            self._index, blocks, q_RHD.data_ptr(), q_RHD.shape[1], count, shared, allowed, rest, out_RK.data_ptr(), threads, scale
        )
        return chosen
