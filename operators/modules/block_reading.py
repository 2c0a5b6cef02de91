"""A prompt's attention over a layer that keeps blocks: its newest tokens meet the sink, the middle by tiles that are unpacked one
after another, and the window, and the parts are merged by the logarithms of their softmaxes' sums. What is in memory at a time
doesn't grow with the context.

Legend: B sequences, S new tokens, N query heads, G heads of keys, R = B * G rows, K picks of a row, X keys, D numbers of a key, V
of a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ktopt.kernels.blocks import attend_tile, merge
from ktopt.operators.modules.block_choice import choose_for_prompt
from ktopt.operators.modules.block_layer import BlockLayer

PIECE_TOKENS = 512
"""Tokens of a prompt that choose blocks together."""

Part = tuple[torch.Tensor, torch.Tensor]
"""Results (S, N, V) and logarithms of sums (S, N)."""


def read(held: BlockLayer, query_BSND: torch.Tensor) -> torch.Tensor:
    """The attention (B, S, N, V) of some tokens, which stand in the window already; then blocks leave. Queries are float32."""
    tokens = query_BSND.shape[1]
    step = PIECE_TOKENS if held.shared.settings.prefill == "sparse" and held.middle else tokens
    pieces = [_Piece(held, query_BSND, at, min(at + step, tokens)).run() for at in range(0, tokens, step)]
    out_BSNV, sums_BSN = pieces[0] if len(pieces) == 1 else (torch.cat(part, dim=1) for part in zip(*pieces, strict=True))
    if held.remembers_queries:
        held.asked.add(query_BSND.transpose(1, 2), sums_BSN.transpose(1, 2), held.get_seq_length())
    held.leave()
    return out_BSNV


class _Piece:
    """The new tokens [at, end) of all that stand in the window last."""

    def __init__(self, held: BlockLayer, query_BSND: torch.Tensor, at: int, end: int) -> None:
        assert held.window is not None
        self.held, self.at = held, at
        self.query_BSND, self.tokens = query_BSND[:, at:end], query_BSND.shape[1]
        self.position = held.get_seq_length() - self.tokens + at
        self.starts = held.starts_B.tolist() if held.starts_B is not None else [0] * len(query_BSND)
        self.parts: list[Part | None] = [None] * len(query_BSND)

    def run(self) -> Part:
        """Results (B, S, N, V) and logarithms of sums (B, S, N)."""
        picks_RK = choose_for_prompt(self.held, self.query_BSND, self.position)
        self._meet_ends()
        if picks_RK is not None:
            self._meet_picks(picks_RK)
        else:
            for first, end in self.held.tiles():
                self.held.prefetch(end, end + self.held.shared.tile_blocks)
                tokens = self.held.shared.tokens
                position = (self.held.shared.sinks + first) * tokens
                hidden = [min(max(0, start - position), (end - first) * tokens) for start in self.starts]
                self._meet(*self.held.blocks(first, end), hidden)
        outs, sums = zip(*(part for part in self.parts if part is not None), strict=True)
        return torch.stack(outs), torch.stack(sums)

    def _meet_picks(self, picks_RK: torch.Tensor) -> None:
        held = self.held
        keys, values = held.unpacked(picks_RK)
        hidden_R = held.hidden(picks_RK)  # padding, all of it before what is seen, and as much for all heads of a sequence
        hidden = [0] * len(self.starts) if hidden_R is None else hidden_R.sum(1).unflatten(0, (len(self.starts), -1))[:, 0].tolist()
        self._meet(keys, values, hidden)

    def _meet_ends(self) -> None:
        """The sink and the window, as far as the piece sees it."""
        held, window = self.held, self.held.window
        assert window is not None
        assert held.sink is not None
        if held.gone:
            sink = held.sink_tokens
            keys, values = held.pair([each[:, :, :sink].flatten(0, 1) for each in held.sink.memory])
            self._meet(keys, values, [min(start, sink) for start in self.starts])
        gone = held.gone * held.shared.tokens
        first = self.position - gone
        keys, values = held.pair([each[:, :, : first + self.query_BSND.shape[1]] for each in window.there()])
        for row, start in enumerate(self.starts):
            self._add(
                row,
                attend_tile(
                    self.query_BSND[row], keys[row], values[row], first=first, start=max(0, start - gone), scale=held.scale
                ),
            )

    def _meet(self, keys_RXD: torch.Tensor, values_RXV: torch.Tensor, hidden: Sequence[int]) -> None:
        """Keys that all of the piece see, but each sequence's first so many."""
        for row, (keys, values) in enumerate(
            zip(*(each.unflatten(0, (len(self.starts), -1)) for each in (keys_RXD, values_RXV)), strict=True)
        ):
            if hidden[row] < keys.shape[1]:
                self._add(
                    row,
                    attend_tile(self.query_BSND[row], keys, values, causal=False, start=hidden[row], scale=self.held.scale),
                )

    def _add(self, row: int, part: Part) -> None:
        before = self.parts[row]
        self.parts[row] = part if before is None else merge([before, part])
