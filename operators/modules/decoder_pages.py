"""A fused decoder layer over the pages of many sequences (ktopt/cache/paged): the kernels run all rows of a step in one call.

Legend: S rows, H hidden size.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ktopt.cache import q8_0
from ktopt.cache.paged.batch import PagedBatch
from ktopt.cache.paged.pools import LayerShape
from ktopt.operators.modules.decoder_blocks import KINDS
from ktopt.operators.modules.fusing import Fused
from ktopt.operators.modules.rotation import rotation

Q8_0_KIND = 8
"""The kernels' number of Q8_0."""


def run_paged(fused: Fused, batch: PagedBatch, kept: torch.dtype | str, out_1SH: torch.Tensor, embeddings: Any) -> str:
    """Run a layer on its input, float32 and contiguous, which becomes its result; or say why not, "" where it has. Keys and values
    are kept in `kept`, and so are latents, which may be in "Q8_0". A step that only asks leaves the input as it is."""
    in_blocks = kept == q8_0.NAME
    dtype = torch.float32 if in_blocks else cast(torch.dtype, kept)
    if fused.latent:
        sizes = (1, sum(fused.latent), 0)
        rotated = fused.latent[1]
    else:
        sizes = (fused.kv_heads, fused.head_dim, fused.head_dim)
        rotated = fused.head_dim
    pool = batch.pool(fused.index, LayerShape(*sizes, dtype, out_1SH.device, in_blocks))
    if pool is None:
        return ""
    held = pool.shape
    if held.device.type != "cpu" or (held.dtype not in KINDS and not held.q8_0):
        return f"a paged cache of {held.dtype} on {held.device}"
    turn = rotation(embeddings)
    if out_1SH.shape[0] != 1 or out_1SH.shape[1] != batch.rows or not turn.fits(1, batch.rows, rotated):
        return "position embeddings of other tokens"
    kind = Q8_0_KIND if held.q8_0 else KINDS[held.dtype]
    cast(Any, fused.run_paged)(
        out_1SH.data_ptr(), batch.rows, turn.cos, turn.sin, kind, *pool.addresses, *batch.addresses, torch.get_num_threads(),
        batch.steady,
    )  # fmt: skip
    return ""
