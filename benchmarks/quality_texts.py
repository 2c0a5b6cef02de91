"""Selection on a real model and real texts, for long_context_quality.py: how much of full attention's mass the chosen blocks hold,
and what choosing does to the next token's distribution. Beside each: local (no block chosen) and the oracle (the blocks with the
most mass).

Legend: N tokens of the text, Q queries, L layers, G KV heads, H query heads of each, D head_dim, T tokens of a block, M blocks that
can be chosen, K of them.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from quality_oracle import oracle_selection
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ktopt.kernels.anchors import Anchors
from ktopt.operators.modules.block_choice import Choice

DOCUMENT = ROOT.parent / "shared" / "cases" / "long_context" / "docs.txt"


def texts(bible: list[str]) -> dict[str, str]:
    """The texts that are at hand: Python's argparse.py; a document, where it lies beside the checkout; and the first book of
    Debian's bible-kjv-text, where `bible` is the command of bible-kjv that prints it."""
    found = {"argparse.py": inspect.getsource(argparse)}
    if DOCUMENT.exists():
        found["docs"] = DOCUMENT.read_text(encoding="utf-8")
    with suppress(OSError, subprocess.CalledProcessError):
        found["bible"] = subprocess.run([*bible, "gen1:1-gen50:26"], capture_output=True, text=True, check=True).stdout
    return found


@contextmanager
def queries_and_keys(model: Any, last: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Collects of each layer, while a text is read whole, the last queries (Q, G * H, D) and all keys (G, N, D), rotated."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        seen.append((q[0, :, -last:].transpose(0, 1).float().clone(), k[0].float().clone()))
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    AttentionInterface.register("ktopt_quality", attend)
    before = model.config._attn_implementation
    model.config._attn_implementation = "ktopt_quality"
    try:
        yield seen
    finally:
        model.config._attn_implementation = before


def recalls(
    layers: list[tuple[torch.Tensor, torch.Tensor]], block: int, budget: int, local: int, types: dict[str, tuple[str, int]],
    shared: bool,
) -> dict[str, float]:  # fmt: skip
    """Mean share of full attention's mass that lies on the sink, the local window and the chosen blocks: for the last queries of
    all layers, for each type of anchors, and "local" and "oracle"."""
    totals: dict[str, list[float]] = {name: [] for name in ("local", *types, "oracle")}
    for queries_QHD, keys_GND in layers:
        kv_heads, tokens, dim = keys_GND.shape
        count = len(queries_QHD)
        end = (tokens - count - local) // block  # blocks 1 to end - 1 can be chosen by every query
        middle_GMTD = keys_GND[:, block : end * block].view(kv_heads, end - 1, block, dim)
        built = {name: _built(kind, number, middle_GMTD, queries_QHD, keys_GND.shape[0]) for name, (kind, number) in types.items()}
        for i, query_HD in enumerate(queries_QHD):
            query_GHD = query_HD.view(kv_heads, -1, dim)
            position = tokens - count + i
            weights_GHN = (query_GHD @ keys_GND[:, : position + 1].transpose(1, 2) * dim**-0.5).softmax(-1)
            mass_GHM = weights_GHN[..., block : end * block].unflatten(-1, (-1, block)).sum(-1)
            base_GH = weights_GHN[..., :block].sum(-1) + weights_GHN[..., end * block :].sum(-1)
            chosen = budget // block
            totals["local"].append(float(base_GH.mean()))
            by_row = mass_GHM.sum(1)
            by_row = by_row.sum(0, keepdim=True).expand_as(by_row) if shared else by_row
            totals["oracle"].append(_held(base_GH, mass_GHM, by_row.topk(chosen, dim=-1).indices))
            for name, anchors in built.items():
                picks = anchors.select(query_GHD.contiguous(), dim**-0.5, chosen, shared=kv_heads if shared else 0)
                totals[name].append(_held(base_GH, mass_GHM, picks.long()))
    return {name: sum(values) / len(values) for name, values in totals.items()}


def _held(base_GH: torch.Tensor, mass_GHM: torch.Tensor, picks_GK: torch.Tensor) -> float:
    chosen_GHK = mass_GHM.gather(2, picks_GK[:, None].expand(-1, mass_GHM.shape[1], -1))
    return float((base_GH + chosen_GHK.sum(-1)).mean())


def _built(kind: str, number: int, keys_GMTD: torch.Tensor, queries_QHD: torch.Tensor, kv_heads: int) -> Anchors:
    rows, blocks, tokens, dim = keys_GMTD.shape
    made = Anchors(kind, number, rows, blocks, tokens, dim)
    importance = None
    if kind == "DYNAMIC":  # chosen by the queries before those that are measured would be fairer; there are none
        query_GXD = queries_QHD.unflatten(1, (kv_heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
        scores_GXN = query_GXD @ keys_GMTD.flatten(1, 2).transpose(1, 2) * dim**-0.5
        importance = scores_GXN.softmax(-1).sum(1).view(rows, blocks, tokens)
    made.add(keys_GMTD, importance)
    return made


def compare(full: list[torch.Tensor], found: list[torch.Tensor]) -> tuple[float, float]:
    """Mean KL(full || found) of the next token's log-probabilities, and how often the likeliest token is the same."""
    kl = [float((full_V.exp() * (full_V - found_V)).sum()) for full_V, found_V in zip(full, found, strict=True)]
    agree = [bool(full_V.argmax() == found_V.argmax()) for full_V, found_V in zip(full, found, strict=True)]
    return sum(kl) / len(kl), sum(agree) / len(agree)


@torch.inference_mode()
def log_probabilities(model: Any, ids_1N: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Of the tokens after each of the last `steps` of a text, which are read one by one."""
    cache = DynamicCache(config=model.config)
    _read(model, ids_1N[:, :-steps], cache)
    return _steps(model, ids_1N, steps, cache)


@torch.inference_mode()
def divergences(
    full: list[torch.Tensor], model: Any, ids_1N: torch.Tensor, steps: int, types: dict[str, int]
) -> dict[str, tuple[float, float]]:
    """What `compare` says of the last `steps` tokens of a text, for each type of anchors, "local" and "oracle". The text before
    them is read once, by a model whose anchors are DYNAMIC; then the cache gets other anchors and gives the steps back, in turn."""
    cache = DynamicCache(config=model.config)
    _read(model, ids_1N[:, :-steps], cache)
    asked = [copy.deepcopy(layer.asked) for layer in cache.layers]
    made = {}
    for name in ("local", *types, "oracle"):
        kind = name if name in types else "BLOCK_MEAN"
        for layer, kept in zip(cache.layers, asked, strict=True):
            _know_by(layer, kind, types.get(kind, 1), copy.deepcopy(kept))
        with oracle_selection("" if name in types else name):
            made[name] = compare(full, _steps(model, ids_1N, steps, cache))
        cache.crop(-steps)
    return made


def _read(model: Any, ids_1N: torch.Tensor, cache: Any, piece: int = 512) -> None:
    for part in ids_1N.split(piece, dim=1):
        model(part, cache=cache, use_cache=True, logits_to_keep=1)


def _steps(model: Any, ids_1N: torch.Tensor, steps: int, cache: Any) -> list[torch.Tensor]:
    made = []
    for token_1 in ids_1N[0, -steps:].split(1):
        made.append(model(token_1[None], cache=cache, use_cache=True).logits[0, -1].float().log_softmax(-1))
    return made


def _know_by(layer: Any, kind: str, number: int, asked: Any) -> None:
    """Have a cache's layer choose by anchors of a kind, as if it had from the begin."""
    settings = layer.shared.settings
    object.__setattr__(settings, "anchor_type", kind)
    object.__setattr__(settings, "anchor_num", number)
    before = layer.anchors
    layer.anchors = Anchors(kind, number, before.rows, before.max_blocks, before.tokens, before.dim)
    for tile in layer.tiles():
        layer.anchors.add(layer.blocks(*tile)[0].unflatten(1, (-1, before.tokens)).float(), None)
    layer.choice, layer.asked = Choice(), asked


def ids_of(tokenizer: Any, text: str, tokens: int) -> torch.Tensor:
    """A text's first tokens (1, N)."""
    return torch.tensor([tokenizer.encode(text)[:tokens]])


def bible_command(folder: Path | None) -> list[str]:
    """The command that prints verses: `bible`, or the one in a folder where Debian's packages were unpacked."""
    if folder is None:
        return ["bible", "-l80"]
    return [str(folder / "usr/bin/bible"), "-p", str(folder / "usr/lib"), "-l80"]
