"""Perplexity of a text under ktopt's CPU plans, beside the float reference of the same quantised weights.

    python benchmarks/perplexity.py [--models NAME ...] [--tokens N] [--window N] [--at-once N ...] [--folder DIR] [--json FILE]

The text is argparse.py as Python ships it, cut into windows that are read each from an empty cache: whole, which runs the
products of many tokens, or some tokens at a time, which runs the kernels of few. The target is half a per cent; of a text of fewer
than some thousand tokens, chance alone is more than that.
"""

from __future__ import annotations

import argparse
import inspect
import math
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Row, arguments, show
from cpu_models import MODELS, model_file
from transformers import DynamicCache

import ktopt
from ktopt.source import SourceFile
from ktopt.weights.tokenizer import find_tokenizer

TARGET_PERCENT = 0.5
REFERENCE = SourceFile("reference.yaml", "version: 1\ndtype: float32\nrules: [{match: '@**', replace: default}]\n")


def text_ids(weights: Path, tokens: int) -> torch.Tensor:
    """The first tokens of argparse.py, (1, T)."""
    tokenizer: Any = find_tokenizer((weights,))
    return torch.tensor([tokenizer.encode(inspect.getsource(argparse))[:tokens]])


@torch.inference_mode()
def perplexity(model: Any, ids_1T: torch.Tensor, window: int, at_once: int) -> float:
    """exp of the mean negative log-likelihood of every token after the first in its window; a window is read `at_once` tokens at a
    time, or whole for 0."""
    total, count = 0.0, 0
    for part_1W in ids_1T.split(window, dim=1):
        if part_1W.shape[1] < 2:
            continue
        cache, pieces = DynamicCache(config=model.config), []
        for piece in part_1W[:, :-1].split(at_once or window, dim=1):
            logits_1TV = model(piece, cache=cache, use_cache=True).logits
            pieces.append(logits_1TV[0].float().log_softmax(-1))
        likely = torch.cat(pieces).gather(1, part_1W[0, 1:, None])
        total, count = total - likely.double().sum().item(), count + likely.numel()
    return math.exp(total / count)


def main() -> None:
    parser = arguments("Perplexity of a text under ktopt's CPU plans, beside the float reference.", runs=1)
    parser.add_argument(
        "--models", nargs="+", choices=[name for name, model in MODELS.items() if model.package], help="default: all"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text (default 4096)")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read from an empty cache (default 512)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[0, 8], help="tokens at a time; 0: whole windows (default 0 8)")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads (default: its own choice)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "models", help="where model files are, or are made")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = []
    for name in options.models or [name for name, model in MODELS.items() if model.package]:
        file, why = model_file(MODELS[name], options.folder)
        if file is None:
            print(f"missing: {name}: {why}")
            continue
        ids = text_ids(file, options.tokens)
        reference = perplexity(ktopt.apply(REFERENCE, file, file), ids, options.window, 0)
        rows.append(Row(f"{name}: float reference", reference, "", note=f"{ids.shape[1]} tokens"))
        model = ktopt.apply(ROOT / MODELS[name].rules, file, file)
        for at_once in options.at_once:
            found = perplexity(model, ids, options.window, at_once)
            how = f"{at_once} at a time" if at_once else "whole windows"
            off = abs(found / reference - 1) * 100
            rows.append(Row(f"{name}: CPU plan, {how}", off, "%", target=TARGET_PERCENT, note=f"perplexity {found:.4f}"))
    show("perplexity of argparse.py", rows, options.json, {"window": options.window, "tokens": options.tokens})


if __name__ == "__main__":
    main()
