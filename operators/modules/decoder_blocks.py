"""A fused decoder layer over a cache in blocks: the kernels run what stands before attention, straight into the cache's window, and
what stands after it.

Legend: B sequences, S new tokens of each, H hidden size, N query heads, R rows, D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from ktopt.diagnostics import KtoptError
from ktopt.operators.modules.block_attention import begin, decode
from ktopt.operators.modules.block_layer import BlockLayer
from ktopt.operators.modules.block_reading import read
from ktopt.operators.modules.fusing import Fused
from ktopt.operators.modules.masks import first_tokens
from ktopt.operators.modules.rotation import rotation

Attend = Callable[[BlockLayer, torch.Tensor], torch.Tensor]
"""Attention with queries (B, N, S, D)."""
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""The kernels' numbers of the dtypes that a window may have."""


def run_blocked(fused: Fused, held: BlockLayer, out_BSH: torch.Tensor, mask: Any, embeddings: Any) -> str:
    """Run a layer on its input, float32 and contiguous, which becomes its result; or say why not, "" where it has. KtoptError,
    before any work, for more tokens than the cache may hold."""
    batch, tokens, hidden = out_BSH.shape
    past, chunk = held.get_seq_length(), held.shared.settings.chunk_size
    held.shared.check_room(past, tokens)
    seen = 0 if mask is None else first_tokens(mask, batch, tokens, past, 0, embeddings)
    if isinstance(seen, str):
        return seen
    turn = rotation(embeddings)
    if not turn.fits(batch, tokens, fused.head_dim):
        return "position embeddings of other tokens"
    if batch > 1 and tokens > chunk:
        return f"{tokens} tokens of {batch} sequences at a time, and a chunk has {chunk}"
    held.start(batch, fused.kv_heads, (fused.head_dim, fused.head_dim), out_BSH.device)
    begin(held, tokens, fused.scale, None if isinstance(seen, int) else seen)
    address, turned = out_BSH.data_ptr(), 4 * fused.head_dim
    attend = decode if held.shared.decodes(tokens) else _read
    for at in range(0, tokens, chunk):
        some = min(chunk, tokens - at)
        place = (turn.cos + at * turned, turn.sin + at * turned, turn.one)
        _run(fused, held, address + at * 4 * hidden, batch, some, place, attend)
    return ""


def _read(held: BlockLayer, query_BNSD: torch.Tensor) -> torch.Tensor:
    return read(held, query_BNSD.transpose(1, 2))


def _run(fused: Fused, held: BlockLayer, x: int, batch: int, tokens: int, turn: tuple[int, int, bool], attend: Attend) -> None:
    """Some tokens, whose hidden states lie at x and their rotation at the other two addresses."""
    window, threads = held.window, torch.get_num_threads()
    assert window is not None
    window.room(tokens)
    keys, values = window.zone.memory
    query_BSND = torch.empty(batch, tokens, fused.heads, fused.head_dim)
    try:
        cast(Any, fused.run_before)(
            x, batch, tokens, *turn, KINDS[keys.dtype], keys.data_ptr(), values.data_ptr(), keys.shape[2], window.end,
            query_BSND.data_ptr(), threads,
        )  # fmt: skip
    except OverflowError as error:
        raise KtoptError(f"layer {fused.index}: {error} (more than 65504): give `kv_type: BF16` or FP32") from None
    window.tokens += tokens
    attended = attend(held, query_BSND.transpose(1, 2))
    cast(Any, fused.run_after)(x, batch * tokens, attended.data_ptr(), threads)
