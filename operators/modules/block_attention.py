"""Attention over a layer that keeps blocks: a decoding token's to the sink, the window and chosen blocks; a prompt's is in
block_reading.py.

Legend: B sequences, S new tokens, N query heads, G heads of keys, R = B * G rows, H query heads of a row, K picks of a row, D
numbers of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ktopt.kernels.blocks import BlockSegments, CacheSegments, Segments, attend, merge
from ktopt.operators.modules.block_choice import Choice, choose
from ktopt.operators.modules.block_device import BlockDevice
from ktopt.operators.modules.block_layer import BlockLayer
from ktopt.operators.modules.block_reading import Part, read

FEW_TOKENS = 16
"""Up to so many new tokens at once (a guess that is checked) don't count as a new prompt."""


def attend_blocks(
    held: BlockLayer, query_BNSD: torch.Tensor, states: tuple[torch.Tensor, ...], scale: float, starts_B: torch.Tensor | None
) -> torch.Tensor:
    """Add new tokens' keys (B, G, S, D) and values to a layer, and attend with their queries: float32 (B, S, N, V).

    starts: each sequence's first token that is no padding. KtoptError, before any work, for more tokens than the cache may hold.
    """
    tokens, step = query_BNSD.shape[2], held.shared.settings.chunk_size
    held.shared.check_room(held.get_seq_length(), tokens)
    held.lazy_initialization(*states)
    begin(held, tokens, scale, starts_B)
    decoding = held.shared.decodes(tokens)
    made = [
        attend_piece(held, query_BNSD[:, :, at : at + step].float(), tuple(each[:, :, at : at + step] for each in states), decoding)
        for at in range(0, tokens, step)
    ]
    return made[0] if len(made) == 1 else torch.cat(made, dim=1)


def attend_piece(held: BlockLayer, query_BNSD: torch.Tensor, states: tuple[torch.Tensor, ...], decoding: bool) -> torch.Tensor:
    """The same for some of the tokens, the next ones, after `begin`. Queries are float32."""
    held.append(*states)
    return decode(held, query_BNSD) if decoding else read(held, query_BNSD.transpose(1, 2).contiguous())


def begin(held: BlockLayer, tokens: int, scale: float, starts_B: torch.Tensor | None) -> None:
    """Note what a layer's next tokens are attended to with; many of them are a new prompt."""
    held.scale, held.starts_B = scale, starts_B
    if held.leads:
        held.shared.prompt_picks.pop(held.number, None)
    if tokens > FEW_TOKENS or held.shared.reading:
        held.choice = Choice()
    elif tokens > 1:
        held.choice.step = 0


def decode(held: BlockLayer, query_BN1D: torch.Tensor) -> torch.Tensor:
    """The attention (B, 1, N, V) of one token, which stands in the window already; then blocks leave."""
    batch, heads, _, dim = query_BN1D.shape
    q_RHD = query_BN1D.reshape(held.rows, -1, dim)
    ends = Ends(held, q_RHD)
    picks_RK = choose(held, q_RHD, ends.log_sums)
    out_RHV, log_sums_RH = _attend_chosen(held, q_RHD, picks_RK, ends)
    if held.anchors is not None and held.shared.settings.anchor_type == "DYNAMIC":
        held.asked.add(query_BN1D, log_sums_RH.view(batch, heads, 1), held.get_seq_length())
    held.leave()
    return out_RHV.view(batch, 1, heads, -1)


class Ends:
    """A token's attention to the sink and the window, `part` when its sums have been asked for."""

    def __init__(self, held: BlockLayer, q_RHD: torch.Tensor) -> None:
        self._held, self._q_RHD = held, q_RHD
        self.part: Part | None = None

    def log_sums(self) -> torch.Tensor:
        """The logarithms of the softmaxes' sums (R, H)."""
        if self.part is None:
            held, q_RHD = self._held, self._q_RHD
            gpu, ends = held.shared.gpu, _ends(held)
            self.part = _attend(held, q_RHD, ends) if gpu is None else gpu.attend(q_RHD, ends, held.scale)
        return self.part[1]


def _attend_chosen(held: BlockLayer, q_RHD: torch.Tensor, picks_RK: torch.Tensor | None, ends: Ends) -> Part:
    """Attention to the sink, the window and chosen blocks, or all: (R, H, V) and (R, H)."""
    store = held.shared.store
    if held.shared.gpu is not None:
        held.shared.prefetch(held.number + 1)
        return _attend_on_gpu(held, held.shared.gpu, q_RHD, ends, picks_RK)
    if picks_RK is not None:
        return _attend_picked(held, q_RHD, ends, picks_RK)
    all_RM = torch.arange(held.middle, dtype=torch.int32).expand(held.rows, -1)
    parts = [ends.part or _attend(held, q_RHD, _ends(held))]
    for first, end in held.tiles():
        some_RK = all_RM[:, first:end].contiguous()
        addresses_RK = store.fetch(held.number, some_RK)
        held.prefetch(end, end + held.shared.tile_blocks)
        parts.append(_attend(held, q_RHD, [_picked(held, addresses_RK, held.hidden(some_RK))]))
    return merge(parts)


def _attend_picked(held: BlockLayer, q_RHD: torch.Tensor, ends: Ends, picks_RK: torch.Tensor) -> Part:
    """In one call, when all blocks have come: sums in another order would be others in their last bits. Where blocks were chosen by
    the attention to the ends, that stays a part, and always does."""
    addresses_RK, rest = held.shared.store.fetch_begin(held.number, picks_RK)
    held.shared.prefetch(held.number + 1)
    if rest is not None:
        addresses_RK = rest()
    picked = _picked(held, addresses_RK, held.hidden(picks_RK))
    if ends.part is None:
        return _attend(held, q_RHD, [*_ends(held), picked])
    return merge([ends.part, _attend(held, q_RHD, [picked])])


def _attend_on_gpu(held: BlockLayer, gpu: BlockDevice, q_RHD: torch.Tensor, ends: Ends, picks_RK: torch.Tensor | None) -> Part:
    """The same on a GPU, whose pool may not hold all blocks at once."""
    if picks_RK is None:
        picks_RK = torch.arange(held.middle, dtype=torch.int32).expand(held.rows, -1)
    first, *others = picks_RK.split(gpu.most_blocks, dim=1)
    before = _ends(held) if ends.part is None else []
    parts = [gpu.attend(q_RHD, [*before, gpu.picked(held.number, first, held.hidden(first))], held.scale)]
    parts += [gpu.attend(q_RHD, [gpu.picked(held.number, some, held.hidden(some))], held.scale) for some in others]
    return merge(parts if ends.part is None else [ends.part, *parts])


def _attend(held: BlockLayer, q_RHD: torch.Tensor, segments: Sequence[Segments]) -> Part:
    layout = held.shared.layout
    assert layout is not None
    return attend(q_RHD.contiguous(), segments, value_dim=layout.value_dim, scale=held.scale)


def _picked(held: BlockLayer, addresses_RK: torch.Tensor, hidden_RK: torch.Tensor | None) -> BlockSegments:
    assert held.shared.layout is not None
    return BlockSegments(held.shared.layout, addresses_RK, hidden_RK)


def _ends(held: BlockLayer) -> list[CacheSegments]:
    """The sink and the window."""
    window, sink, gone = held.window, held.sink, held.gone * held.shared.tokens
    assert window is not None
    assert sink is not None
    last = window.zone.segments(window.first, window.end, held.starts_R, gone)
    return [sink.segments(0, held.sink_tokens, held.starts_R, 0), last] if gone else [last]
