"""KDynamicAttention on DeepSeek's latent attention: the cache keeps each token's latent and rotated key in blocks, and queries are
absorbed, so that all heads attend to the same rows.

Legend: B sequences, S new tokens, N heads, L kv_lora_rank, R qk_rope_head_dim, W = L + R, V v_head_dim.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext
from ktopt.operators.modules.attention_function import starts_of
from ktopt.operators.modules.attention_mla import KDeepseekV2Attention, computes_as_deepseek
from ktopt.operators.modules.block_attention import attend_piece, begin
from ktopt.operators.modules.block_layer import BlockLayer
from ktopt.operators.modules.dynamic_attention import Blocked

ABSORBED_NUMBERS = 1 << 25
"""Numbers of absorbed queries, float32, that are in memory at a time."""


class LatentBlocks(BlockLayer):
    """A layer's latents in blocks. As transformers' Cache has it, its keys are the latents (B, 1, N, L) and its values the rotated
    keys (B, 1, N, R)."""

    LATENT = True
    keys = property(lambda self: self._half(0), lambda self, tensor: self._refuse(tensor))
    values = property(lambda self: self._half(1), lambda self, tensor: self._refuse(tensor))

    def _half(self, which: int) -> torch.Tensor | None:
        whole_B1NW = self._whole(0)
        if whole_B1NW is None or self.shared.layout is None:
            return None
        latent = self.shared.layout.value_dim
        return whole_B1NW[..., latent:] if which else whole_B1NW[..., :latent]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        latent, rope = key_states.shape[-1], value_states.shape[-1]
        self.start(key_states.shape[0], 1, (latent + rope, latent), key_states.device)

    def append(self, *states: torch.Tensor) -> None:
        """Add latents (B, 1, S, L) and rotated keys (B, 1, S, R)."""
        super().append(torch.cat(states, dim=-1) if len(states) > 1 else states[0])


class KDynamicLatentAttention(Blocked, KDeepseekV2Attention):  # type: ignore[misc]  # settings are those of blocks
    """What is mixed into a latent attention's class."""

    LAYER = LatentBlocks

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        """The original's children under a class of its own. KtoptError where its class computes more than DeepSeek's."""
        if not computes_as_deepseek(cast(Any, type(original))):
            raise KtoptError(f"{type(original).__name__} computes more than DeepSeek's latent attention")
        return super().build(original, context)

    def _attention(
        self,
        x_BSH: torch.Tensor,
        attention_mask: Any = None,
        position_embeddings: Any = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor | str:
        cache = cache if cache is not None else past_key_values
        if reason := self._unfit(x_BSH, position_embeddings, kwargs):
            return reason
        if cache is None:
            return "there is no cache"
        held = self.block_layer(cache)
        if held is None:
            return "a cache of another kind"
        return attend_latents(self, x_BSH, attention_mask, position_embeddings, held)


def attend_latents(
    attention: KDeepseekV2Attention, x_BSH: torch.Tensor, mask: Any, embeddings: Any, held: BlockLayer
) -> torch.Tensor:
    """Latent attention of new tokens over a cache in blocks: (B, S, hidden). KtoptError, before any work, for more tokens than the
    cache may hold, and for a mask of more than causality and padding."""
    batch, tokens, _ = x_BSH.shape
    past = held.get_seq_length()
    held.shared.check_room(past, tokens)
    starts_B = starts_of(mask, batch, tokens, past, 0)
    latents_BSW = attention._latents(x_BSH, embeddings)
    rank = attention.kv_lora_rank
    held.start(batch, 1, (latents_BSW.shape[-1], rank), x_BSH.device)
    begin(held, tokens, attention.scaling, starts_B)
    query_BNSX = attention._queries(x_BSH, embeddings).transpose(1, 2)
    step = max(1, min(held.shared.settings.chunk_size, ABSORBED_NUMBERS // (batch * attention.num_heads * latents_BSW.shape[-1])))
    made = []
    for at in range(0, tokens, step):
        absorbed_BNSW = attention._absorbed_query(query_BNSX[:, :, at : at + step]).float()
        out_BSNL = attend_piece(held, absorbed_BNSW, (latents_BSW[:, None, at : at + step],), held.shared.decodes(tokens))
        made.append(attention.matrices.values(out_BSNL.transpose(1, 2).to(x_BSH.dtype)).transpose(1, 2))
    result: torch.Tensor = attention.o_proj(torch.cat(made, dim=1).flatten(2).to(x_BSH.dtype))
    return result
