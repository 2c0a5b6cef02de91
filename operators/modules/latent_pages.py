"""Latent attention over the pages of many sequences (ktopt/cache/paged), for modules that aren't run as a part of a layer.

Sequences with few new tokens, which decode, go through the CPU's kernel together; each one's piece of a prompt is attended to as a
prompt is, over a view of its pages as a LatentLayer.

Legend: N heads, S rows, Q rows of some sequences, H numbers of a head's query, V of its result, W of a latent with its rotary key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ktopt.cache import q8_0
from ktopt.cache.paged.batch import PagedBatch
from ktopt.cache.paged.latents import latent_view
from ktopt.cache.paged.pools import LayerShape
from ktopt.kernels import cpu
from ktopt.kernels.cpu import latent
from ktopt.operators.modules.tiled_attention import Seen


def attend_pages(module: Any, x_1SH: torch.Tensor, embeddings: Any, batch: PagedBatch, few: int) -> torch.Tensor:
    """The result (1, S, hidden) of the rows of many sequences, whose latents go into their pages. Up to `few` new tokens of a
    sequence decode. Zeros in a step that only asks."""
    latents_1SW = module._latents(x_1SH, embeddings)
    dtype = module.kept if isinstance(module.kept, torch.dtype) else latents_1SW.dtype
    in_blocks = module.kept == q8_0.NAME
    shape = LayerShape(1, latents_1SW.shape[2], 0, dtype, latents_1SW.device, in_blocks)
    if batch.pool(module.layer_idx, shape) is None:
        return torch.zeros_like(x_1SH)
    batch.put_latents(module.layer_idx, latents_1SW[0])
    out_1SNV = _attended(module, batch, module._queries(x_1SH, embeddings), few)
    result: torch.Tensor = module.o_proj(out_1SNV.flatten(2).to(x_1SH.dtype))
    return result


def _attended(module: Any, batch: PagedBatch, query_1SNH: torch.Tensor, few: int) -> torch.Tensor:
    """The result (1, S, N, V) of queries on latents that stand in their pages."""
    out_1SNV = query_1SNH.new_empty(*query_1SNH.shape[:3], module.v_head_dim)
    short = [piece for piece, tokens in enumerate(batch.tokens) if tokens <= few]
    if short and not _by_kernel(module, batch, short, query_1SNH, out_1SNV):
        short = []
    for piece in sorted(set(range(len(batch.tokens))) - set(short)):
        rows, past = batch.rows_of(piece), int(batch.pasts[piece])
        held = latent_view(batch, module.layer_idx, piece, (module.kv_lora_rank, module.qk_rope_head_dim))
        out_1SNV[:, rows] = module.attend_tiles(query_1SNH[:, rows], held, Seen(past, None), past + batch.tokens[piece])
    return out_1SNV


def _by_kernel(module: Any, batch: PagedBatch, pieces: list[int], query_1SNH: torch.Tensor, out_1SNV: torch.Tensor) -> bool:
    """Whether the CPU's kernel has written the results of some sequences."""
    pool = batch.pools[module.layer_idx]
    kind = pool.kind
    if not query_1SNH.is_cpu or kind is None or not cpu.available()[0]:
        return False
    blocks = module.matrices.blocks()
    if blocks is None or module.kv_lora_rank % 16 or module.qk_rope_head_dim % 2:
        return False
    table = np.zeros((len(pieces), max(batch.sequences[piece].page_count for piece in pieces)), dtype=np.int32)
    rows: list[int] = []
    described: list[tuple[int, int, int]] = []
    for at, piece in enumerate(pieces):
        own, past = batch.sequences[piece].table, int(batch.pasts[piece])
        table[at, : len(own)] = own
        new = batch.rows_of(piece)
        rows += range(new.start, new.stop)
        described += [(at, 0, past + i + 1) for i in range(batch.tokens[piece])]
    keys, values = blocks
    at_Q = torch.tensor(rows)
    out_QNV = latent.absorbed_attention(
        query_1SNH[0, at_Q].float().contiguous(), pool.keys, kind, torch.from_numpy(table), torch.tensor(described),
        keys, values, module.scaling, torch.get_num_threads(),
    )  # fmt: skip
    out_1SNV[0, at_Q] = out_QNV.to(out_1SNV.dtype)
    return True
