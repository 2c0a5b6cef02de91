"""Which middle blocks a decoding token attends to, layer by layer: KTransformers' rules of dense layers, steps and preselection.

Legend: B sequences, G heads of keys, R = B * G rows, H query heads of a row, M middle blocks, K picks of a row, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ktopt.operators.modules.block_layer import BlockLayer

LogSums = Callable[[], torch.Tensor]
"""Computes the logarithms (R, H) of what the heads' softmaxes sum over the sink and the window."""
SAMPLE = 16
"""How many of a prompt's tokens that choose together are looked at."""


@dataclass(eq=False)
class Choice:
    """What a layer has settled since the last prompt.

    step     tokens that were decoded since then
    known    whether the prompt's last queries have been looked at
    tokens   how many were in the cache then
    shortlist  (R, M then) bool: the preselected blocks; None where all blocks may be chosen
    """

    step: int = 0
    known: bool = False
    tokens: int = 0
    shortlist_RM: torch.Tensor | None = None

    def after_crop(self, tokens: int) -> Choice:
        """What of it holds where only so many tokens stay: all but the step where these include the prompt, else nothing."""
        if not self.known or tokens < self.tokens - 1:
            return Choice()
        return Choice(0, True, self.tokens, self.shortlist_RM)


def choose(held: BlockLayer, q_RHD: torch.Tensor, ends: LogSums) -> torch.Tensor | None:
    """The blocks (R, K) int32 that this token attends to beside the sink and the window (`ends`, asked only where blocks are chosen
    by shares of the softmax); None for all."""
    shared, choice, group, settings = held.shared, held.choice, held.group, held.shared.settings
    step = choice.step
    choice.step += 1
    middle = held.middle
    if middle == 0 or held.dense:
        return None
    if not held.leads:
        return shared.picks.get(group)
    if middle <= settings.second_select_num and not _restricted(held):
        shared.picks[group] = None
        return None
    last = shared.picks.get(group)
    if last is None or step % (settings.token_step or 1) == 0:
        _look_at_prompt(held)
        shared.picks[group] = last = _best(held, q_RHD, settings.second_select_num, _allowed(held), ends).cpu()
    return last


def choose_for_prompt(held: BlockLayer, q_BSND: torch.Tensor, position: int) -> torch.Tensor | None:
    """The blocks (R, K) that some tokens of a prompt attend to, from `position` on, by a sample of them; None for all. Shares are
    of the middle blocks alone: what the tokens give to the sink and the window isn't known yet."""
    shared, settings = held.shared, held.shared.settings
    if settings.prefill == "exact" or held.middle <= settings.second_select_num or held.dense:
        return None
    picks = shared.prompt_picks.setdefault(held.group, {})
    if shared.leads(held.number):
        _batch, tokens, _, dim = q_BSND.shape
        at = torch.linspace(0, tokens - 1, min(SAMPLE, tokens)).round().long()
        q_RHD = q_BSND[:, at].transpose(1, 2).reshape(held.rows, -1, dim)
        picks[position] = _best(held, q_RHD, settings.second_select_num, None, None).cpu()
    return picks[position]


def _restricted(held: BlockLayer) -> bool:
    """Whether a preselection leaves some of the blocks out."""
    settings = held.shared.settings
    return (
        settings.preselect_block
        and held.middle > settings.preselect_block_count
        and (held.choice.shortlist_RM is not None or not held.choice.known)
    )


def _allowed(held: BlockLayer) -> torch.Tensor | None:
    """(R, M): the preselected blocks, and those that have filled since."""
    shortlist_RM = held.choice.shortlist_RM
    if shortlist_RM is None:
        return None
    return torch.nn.functional.pad(shortlist_RM, (0, held.middle - shortlist_RM.shape[1]), value=True)


def _best(held: BlockLayer, q_RHD: torch.Tensor, count: int, allowed_RM: torch.Tensor | None, ends: LogSums | None) -> torch.Tensor:
    assert held.anchors is not None
    assert held.window is not None
    shared = held.window.shape[1] if held.shared.settings.head_select_mode == "SHARED" else 0
    rest_RH = ends() if ends is not None and held.anchors.by_shares else None
    starts_R = held.starts_R
    if starts_R is None:
        return held.anchors.select(q_RHD, held.scale, count, shared=shared, allowed_RM=allowed_RM, rest_RH=rest_RH)
    return _best_of_padded(held, q_RHD, count, allowed_RM, shared, starts_R, rest_RH)


def _best_of_padded(
    held: BlockLayer,
    q_RHD: torch.Tensor,
    count: int,
    allowed_RM: torch.Tensor | None,
    shared: int,
    starts_R: torch.Tensor,
    rest_RH: torch.Tensor | None,
) -> torch.Tensor:
    """The same where sequences begin with padding: no block of that alone, but the first with a token, a padded sequence's sink."""
    assert held.anchors is not None
    tokens, sinks = held.shared.tokens, held.shared.sinks
    block_M = torch.arange(held.middle, device=starts_R.device)
    first_R1 = (starts_R // tokens - sinks).unsqueeze(1)
    real_RM = block_M >= first_R1
    allowed_RM = real_RM if allowed_RM is None else real_RM & allowed_RM
    scores_RM = held.anchors.scores(q_RHD, held.scale, count, shared=shared, allowed_RM=allowed_RM, rest_RH=rest_RH)
    scores_RM = scores_RM.masked_fill(block_M == first_R1, float("inf"))
    least = int(allowed_RM.sum(1).amax())
    return scores_RM.topk(min(count, max(1, least)), dim=1).indices.sort(dim=1).values.int()


def _look_at_prompt(held: BlockLayer) -> None:
    """Once after each prompt: make DYNAMIC's anchors and the preselection from its last queries."""
    choice, settings = held.choice, held.shared.settings
    if choice.known:
        return
    choice.known, choice.tokens = True, held.get_seq_length()
    wanted = settings.preselect_block and held.middle > settings.preselect_block_count
    if not held.asked.queries or not (wanted or settings.anchor_type == "DYNAMIC"):
        return
    importance_RN = _importance(held)
    if wanted:
        choice.shortlist_RM = _preselected(held, importance_RN)


def _importance(held: BlockLayer) -> torch.Tensor:
    """(R, N) of all tokens; DYNAMIC's anchors are made anew on the way."""
    shared, tokens, assured = held.shared, held.shared.tokens, held.window
    assert assured is not None
    assert held.sink is not None
    assert held.anchors is not None
    assert held.sink is not None
    dynamic = shared.settings.anchor_type == "DYNAMIC"
    parts, sinks = [], shared.sinks * tokens
    parts.append(_asked(held, held.sink.memory[0].flatten(0, 1), 0))
    if dynamic:
        held.anchors.truncate(0)
    for first, end in held.tiles():
        keys_RXD = held.blocks(first, end)[0]
        parts.append(_asked(held, keys_RXD, sinks + first * tokens))
        if dynamic:
            held.anchors.add(keys_RXD.unflatten(1, (-1, tokens)), parts[-1].unflatten(1, (-1, tokens)))
    parts.append(_asked(held, assured.there()[0].flatten(0, 1), held.gone * tokens))
    return torch.cat(parts, dim=1)


def _asked(held: BlockLayer, keys_RXD: torch.Tensor, first: int) -> torch.Tensor:
    return held.asked.importance(keys_RXD, first, held.scale, held.starts_R)


def _preselected(held: BlockLayer, importance_RN: torch.Tensor) -> torch.Tensor:
    """(R, M): the blocks with the most importance a token, over each block and a quarter of a block on either side."""
    assert held.window is not None
    tokens, settings = held.shared.tokens, held.shared.settings
    if settings.head_select_mode == "SHARED":
        heads = held.window.shape[1]
        together = importance_RN.unflatten(0, (-1, heads)).sum(1, keepdim=True)
        importance_RN = together.expand(-1, heads, -1).flatten(0, 1)
    sums = torch.nn.functional.pad(importance_RN.double().cumsum(1), (1, 0))
    begin_M = (held.shared.sinks + torch.arange(held.middle, device=sums.device)) * tokens
    first_M, end_M = (begin_M - tokens // 4).clamp(min=0), (begin_M + tokens + tokens // 4).clamp(max=importance_RN.shape[1])
    pooled_RM = (sums[:, end_M] - sums[:, first_M]) / (end_M - first_M)
    best = pooled_RM.topk(settings.preselect_block_count, dim=1).indices
    return torch.zeros_like(pooled_RM, dtype=torch.bool).scatter_(1, best, True)
