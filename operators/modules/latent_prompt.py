"""A prompt's latent attention on the CPU: keys and values of all tokens are expanded for some heads at a time, and the CPU kernels
attend to them, with no scores in memory.

Legend: B sequences, S queries, T tokens of the context, N heads, P qk_nope, R qk_rope, L kv_lora_rank, V v_head_dim.
"""

from __future__ import annotations

import torch

from ktopt.cache.latent import LatentLayer
from ktopt.kernels import cpu
from ktopt.kernels.cpu.attention import prefill_attention
from ktopt.operators.latent_memory import heads_together
from ktopt.operators.modules.latent_matrices import LatentMatrices
from ktopt.operators.modules.masks import first_tokens
from ktopt.operators.modules.tiled_attention import Seen


def attend_prompt(
    query_BSNH: torch.Tensor, held: LatentLayer, matrices: LatentMatrices, seen: Seen, scale: float
) -> torch.Tensor | None:
    """The result (B, S, N, V) in the query's dtype; None where it isn't for the kernels: on another device, under a mask that is
    more than causality and padding, or with heads of sizes that they don't take.

    Keys and values are in float32 where the cache is, else in bfloat16.
    """
    batch, queries, heads, numbers = query_BSNH.shape
    if not query_BSNH.is_cpu or not cpu.available()[0] or numbers % 8 or matrices.value % 8:
        return None
    starts = 0 if seen.mask is None else first_tokens(seen.mask, batch, queries, seen.past, 0)
    if isinstance(starts, str):
        return None
    dtype: torch.dtype = torch.float32 if held.dtype is torch.float32 else torch.bfloat16
    context = seen.past + queries
    together = heads_together(heads, context * (numbers + matrices.value) * dtype.itemsize)
    out_BSNV = torch.empty(batch, queries, heads, matrices.value)
    latents_BTW = held.latents(0, context)
    for row in range(batch):
        query_SNH = query_BSNH[row].float().contiguous()
        latents_TW = latents_BTW[row].to(dtype)
        start = starts if isinstance(starts, int) else int(starts[row])
        for head in range(0, heads, together):
            part = slice(head, head + together)
            keys, values = _expanded(latents_TW, matrices, part, numbers)
            prefill_attention(
                query_SNH[:, part], keys, values, first=seen.past, start=start, scale=scale, out_THV=out_BSNV[row][:, part],
                threads=torch.get_num_threads(),
            )  # fmt: skip
            del keys, values  # before the next heads' are made
    return out_BSNV.to(query_BSNH.dtype)


def _expanded(latents_TW: torch.Tensor, matrices: LatentMatrices, part: slice, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (heads, T, P + R) and values (heads, T, V) of some heads."""
    keys_NPL, values_NVL = matrices.pair(latents_TW.dtype)
    latent_TL, rope_TR = latents_TW.split((keys_NPL.shape[2], numbers - matrices.nope), dim=-1)
    made = []
    for matrix_NOL in (keys_NPL[part], values_NVL[part]):
        product_TX = latent_TL @ matrix_NOL.reshape(-1, matrix_NOL.shape[2]).T
        made.append(product_TX.unflatten(-1, matrix_NOL.shape[:2]).transpose(0, 1))
    keys = latents_TW.new_empty(made[0].shape[0], latents_TW.shape[0], numbers)
    keys[..., : matrices.nope] = made[0]
    keys[..., matrices.nope :] = rope_TR
    return keys, made[1].contiguous()
