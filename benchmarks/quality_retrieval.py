"""Constructed retrieval for long_context_quality.py: which anchors find a single key among 139,264.

Keys are unit vectors; 64 of them, the needles, stand alone in their blocks. A query is a needle turned a little (cosine .96), and
its scores are 40 times the cosines, so that full attention puts all its mass on the needle. A needle is found where its block is
among those chosen. Kinds of keys: isotropic; topics, where the keys of a stretch point much the same way; filler, a few sentences
over and over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from ktopt.kernels.anchors import Anchors

DIM, NEEDLES, COSINE, SHARPNESS = 64, 64, 0.96, 40.0
TOPIC_TOKENS, SENTENCE_TOKENS = 512, 48


@dataclass(frozen=True)
class Haystack:
    """Keys (1, N, D) of one row, the blocks of the needles, and a query (NEEDLES, D) for each."""

    kind: str
    block: int
    keys_1ND: torch.Tensor
    needle_blocks: list[int]
    queries_QD: torch.Tensor


def haystack(kind: str, tokens: int, block: int, seed: int = 0) -> Haystack:
    """Keys of a kind (isotropic, topics, filler) with needles in blocks of their own."""
    random = torch.Generator().manual_seed(seed)
    keys_ND = _keys(kind, tokens, random)
    blocks = torch.randperm(tokens // block, generator=random)[:NEEDLES].sort().values
    at = blocks * block + torch.randint(block, (NEEDLES,), generator=random)
    needles_QD = normalize(torch.randn(NEEDLES, DIM, generator=random), dim=-1)
    keys_ND[at] = needles_QD
    aside_QD = torch.randn(NEEDLES, DIM, generator=random)
    aside_QD = normalize(aside_QD - (aside_QD * needles_QD).sum(-1, keepdim=True) * needles_QD, dim=-1)
    return Haystack(kind, block, keys_ND[None], blocks.tolist(), COSINE * needles_QD + (1 - COSINE**2) ** 0.5 * aside_QD)


def _keys(kind: str, tokens: int, random: torch.Generator) -> torch.Tensor:
    noise_ND = normalize(torch.randn(tokens, DIM, generator=random), dim=-1)
    if kind == "isotropic":
        return noise_ND
    if kind == "topics":
        topics = normalize(torch.randn(-(-tokens // TOPIC_TOKENS), DIM, generator=random), dim=-1)
        return normalize(0.8 * topics.repeat_interleave(TOPIC_TOKENS, dim=0)[:tokens] + 0.6 * noise_ND, dim=-1)
    sentence = normalize(torch.randn(SENTENCE_TOKENS, DIM, generator=random), dim=-1)
    return normalize(sentence.repeat(-(-tokens // SENTENCE_TOKENS), 1)[:tokens] + 0.3 * noise_ND, dim=-1)


def full_attention(hay: Haystack) -> tuple[int, float]:
    """How many needles full attention's largest weight lies on, and the least mass that it puts on one's block."""
    weights_QN = (hay.queries_QD @ hay.keys_1ND[0].T * SHARPNESS).softmax(-1)
    best = weights_QN.argmax(-1) // hay.block
    mass_Q = weights_QN.view(NEEDLES, -1, hay.block).sum(-1).gather(1, torch.tensor(hay.needle_blocks)[:, None])
    return sum(int(a) == b for a, b in zip(best, hay.needle_blocks, strict=True)), float(mass_Q.min())


def found(hay: Haystack, anchor_type: str, anchor_num: int, budgets: list[int], asked: str) -> list[int]:
    """Needles found with each budget of blocks. asked: "prompt" where the queries that DYNAMIC's anchors are chosen by are the
    question's own, "later" where they are others."""
    blocks = hay.keys_1ND.shape[1] // hay.block
    hits = [0] * len(budgets)
    kept: Anchors | None = None
    for query_D, needle in zip(hay.queries_QD, hay.needle_blocks, strict=True):
        if kept is None or (anchor_type == "DYNAMIC" and asked == "prompt"):
            kept = _anchors(hay, anchor_type, anchor_num, query_D if asked == "prompt" else _another(query_D))
        for i, budget in enumerate(budgets):
            picks = kept.select(query_D.view(1, 1, DIM).contiguous(), SHARPNESS, min(budget, blocks))
            hits[i] += needle in picks[0].tolist()
    return hits


def _another(query_D: torch.Tensor) -> torch.Tensor:
    return normalize(torch.randn(query_D.shape, generator=torch.Generator().manual_seed(1)), dim=-1)


def _anchors(hay: Haystack, anchor_type: str, anchor_num: int, asker_D: torch.Tensor) -> Anchors:
    keys_1KTD = hay.keys_1ND.view(1, -1, hay.block, DIM)
    blocks = keys_1KTD.shape[1]
    importance = (keys_1KTD @ asker_D * SHARPNESS).flatten(1).softmax(-1).view(1, blocks, hay.block)
    made = Anchors(anchor_type, anchor_num, 1, blocks, hay.block, DIM)
    made.add(keys_1KTD, importance if anchor_type == "DYNAMIC" else None)
    return made
