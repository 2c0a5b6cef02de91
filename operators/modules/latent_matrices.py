"""What latent attention takes from kv_b_proj: context expanded to keys and values, or the two matrices that queries and results are
multiplied by instead (W_UK and W_UV), from whatever the projection is stored as and without a second copy of it.

Legend: B sequences, S queries, T tokens, N heads, P qk_nope_head_dim, V v_head_dim, L kv_lora_rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ktopt.kernels import cpu
from ktopt.kernels.cpu.latent import HeadBlocks
from ktopt.operators.modules.linear import KTransformersLinear

EVERY = slice(None)
"""All heads."""


class LatentMatrices:
    """Reads one kv_b_proj (N * (P + V), L) in all the ways that attention needs it."""

    def __init__(self, projection: nn.Module, heads: int, nope: int, value: int) -> None:
        self.projection, self.heads, self.nope, self.value = projection, heads, nope, value
        self._blocks: tuple[HeadBlocks, HeadBlocks] | None = None
        self._owner: Any = None
        self._at = 0
        self._made: torch.Tensor | None = None

    def expand(self, latents_BTL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k_nope (B, N, T, P) and v (B, N, T, V) of these tokens."""
        if self.split is not None:
            keys_NLP, values_NVL = self.projection.numbers(latents_BTL.dtype)  # type: ignore[operator]
            latents_B1TL = latents_BTL.unsqueeze(1)
            return latents_B1TL @ keys_NLP, latents_B1TL @ values_NVL.mT
        both_BTNX: torch.Tensor = self.projection(latents_BTL).unflatten(-1, (self.heads, self.nope + self.value))
        keys, values = both_BTNX.transpose(1, 2).split((self.nope, self.value), dim=-1)
        return keys, values

    @property
    def split(self) -> tuple[cpu.Blocks, cpu.Blocks] | None:
        """The stored keys' and values' matrices, where the projection is kept as two."""
        found: tuple[cpu.Blocks, cpu.Blocks] | None = getattr(self.projection, "split", None)
        return found

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """(N, P + V, L): a view of the weight where it is numbers of that dtype, else numbers made for this call."""
        weight = self.projection.weight if is_its_weight(self.projection) else self._from_products(dtype)
        return weight.to(dtype).unflatten(0, (self.heads, self.nope + self.value))

    def _from_products(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix of a projection that computes more than its weight says (packed, scaled, with an adapter), read off its
        products with unit vectors, and kept until `forget`."""
        if self._made is None or self._made.dtype is not dtype:
            columns = self.projection.in_features
            device = next((t.device for t in (*self.projection.parameters(), *self.projection.buffers())), None)
            unit = torch.eye(columns, dtype=dtype, device=device)
            self._made = self.projection(unit).T.contiguous()
        return self._made

    def forget(self) -> None:
        """Let go of what was made of the projection's products: by the next call, others may come of it."""
        self._made = None

    def pair(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK (N, P, L) and W_UV (N, V, L) as numbers of `dtype`."""
        if self.split is not None:
            keys_NLP, values_NVL = self.projection.numbers(dtype)  # type: ignore[operator]
            return keys_NLP.mT, values_NVL
        whole_NXL = self.whole(dtype)
        return whole_NXL[:, : self.nope], whole_NXL[:, self.nope :]

    def absorb(self, query_BNSP: torch.Tensor, heads: slice = EVERY) -> torch.Tensor:
        """q_nope W_UK of these heads: (B, N, S, L)."""
        if self.split is not None:
            return _by_head(query_BNSP, self.projection.numbers(query_BNSP.dtype)[0].mT[heads])  # type: ignore[operator]
        return _by_head(query_BNSP, self.whole(query_BNSP.dtype)[heads, : self.nope])

    def values(self, latents_BNSL: torch.Tensor, heads: slice = EVERY) -> torch.Tensor:
        """Weighted latents times W_UV of these heads: (B, N, S, V)."""
        if self.split is not None:
            return _by_head(latents_BNSL, self.projection.numbers(latents_BNSL.dtype)[1].mT[heads])  # type: ignore[operator]
        return _by_head(latents_BNSL, self.whole(latents_BNSL.dtype)[heads, self.nope :].mT)

    def blocks(self) -> tuple[HeadBlocks, HeadBlocks] | None:
        """W_UK and W_UV for the CPU kernels, as they are stored; None where the kernels can't take them."""
        if self.split is not None:
            keys, values = self.split
            return HeadBlocks(keys, keys.rows // self.heads, keys.rows // self.heads), HeadBlocks(values, self.value, self.value)
        parts = getattr(self.projection, "parts", [])
        if len(parts) == 1:
            owner, both = parts[0][1], parts[0][1]
        elif is_its_weight(self.projection):
            owner = self.projection._parameters.get("weight")
            if owner is None or not owner.is_cpu or not owner.is_contiguous():
                return None
            both = None
        else:
            return None
        at = owner.data_ptr() if isinstance(owner, torch.Tensor) else 0
        if self._owner is not owner or self._at != at or self._blocks is None:
            self._at = at
            both = both or cpu.tensor_blocks(owner.detach())
            if both is None:
                return None
            step = self.nope + self.value
            absorbing = HeadBlocks(both, self.nope, step, transposed=True)
            self._owner, self._blocks = owner, (absorbing, HeadBlocks(both, self.value, step, self.nope))
        return self._blocks


def is_its_weight(projection: nn.Module) -> bool:
    """Whether a projection's product is that of its `weight` and nothing else, as in torch's linears and ktopt's. Others may scale
    it (FP8), add to it (adapters), or keep it packed."""
    if "forward" in projection.__dict__:
        return False
    if isinstance(projection, KTransformersLinear):
        return True
    return type(projection).forward is nn.Linear.forward and projection.weight.is_floating_point()


def _by_head(x_BNSI: torch.Tensor, matrices_NIO: torch.Tensor) -> torch.Tensor:
    batch, heads, queries, _ = x_BNSI.shape
    if batch == 1:
        return (x_BNSI[0] @ matrices_NIO).unsqueeze(0)
    x_NI = x_BNSI.transpose(0, 1).reshape(heads, batch * queries, -1)
    return (x_NI @ matrices_NIO).view(heads, batch, queries, -1).transpose(0, 1)
