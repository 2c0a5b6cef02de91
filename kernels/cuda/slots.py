"""Blocks of a long cache on a device: in slots of a pool (ktopt/cache/blocks/device_pool.py), in float16 or bfloat16.

Legend: R rows (a KV head of a sequence), K blocks of a row, T tokens of a block, D numbers of a key, V of a value, S slots, N
numbers of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktopt.cache.blocks.layout import BlockLayout
from ktopt.kernels import block_reference


def halves(blocks_SB: torch.Tensor, layout: BlockLayout, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Blocks of any layout, uint8 (S, layout.nbytes), as they stand in slots: (S, T * (D + V)) of float16 or bfloat16, on the same
    device. Latents, whose values are parts of their keys, are (S, T * D)."""
    split = layout.tokens * layout.key_row_bytes
    ends = [(0, split)]
    if not layout.shared:
        ends.append((split, split + layout.tokens * layout.value_row_bytes))
    parts = [blocks_SB[:, begin:end].unflatten(1, (layout.tokens, -1)) for begin, end in ends]
    return torch.cat([block_reference.dequantize(part, layout.kind).to(dtype).flatten(1) for part in parts], 1)


@dataclass(frozen=True, slots=True, eq=False)
class SlotSegments:
    """Blocks that each row attends to: `slots` (R, K), int32 or int64, on the pool's device.

    pool    (S, T * (D + V)), contiguous: a block's keys, then its values; of latents (S, T * D)
    hidden  (R, K) int64 on the CPU: how many of a block's first tokens aren't seen (padding). A block of which none is seen may
            have the slot -1
    """

    pool_SN: torch.Tensor
    slots_RK: torch.Tensor
    block_tokens: int
    key_dim: int
    hidden_RK: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Of a row, hidden ones included."""
        return int(self.slots_RK.shape[1]) * self.block_tokens

    @property
    def stored_value_dim(self) -> int:
        """V; 0 where values are the first numbers of their keys."""
        return int(self.pool_SN.shape[1]) // self.block_tokens - self.key_dim

    def numbers(self, value_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys (R, K * T, D), values (R, K * T, V) and which are seen (R, K * T)."""
        stored = self.stored_value_dim
        if stored not in (0, value_dim) or value_dim > self.key_dim + stored:
            raise ValueError(f"slots have values of {stored or self.key_dim} numbers, and {value_dim} are wanted")
        rows, count = self.slots_RK.shape
        taken = self.pool_SN[self.slots_RK.long().clamp(min=0)].view(rows, count, self.pool_SN.shape[1])
        keys, values = (
            part.reshape(rows, self.tokens, dim)
            for part, dim in zip(
                taken.split([self.block_tokens * self.key_dim, self.block_tokens * stored], 2), (self.key_dim, stored), strict=True
            )
        )
        seen = torch.ones(rows, self.tokens, dtype=torch.bool, device=device)
        if self.hidden_RK is not None:
            place = torch.arange(self.block_tokens, device=device)
            seen = (place >= self.hidden_RK.to(device)[..., None]).flatten(1)
        return keys, values if stored else keys[..., :value_dim], seen
