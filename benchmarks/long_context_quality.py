"""What choosing blocks costs: constructed retrieval, real texts, and a passkey, each beside full attention, the local window alone
and the oracle.

    GOMP_SPINCOUNT=2000 python benchmarks/long_context_quality.py [--parts NAME ...] [--bible-folder DIR] [--json FILE]

retrieval  needles of 64 found among --tokens constructed keys, at budgets from 96 blocks down to 8 (quality_retrieval.py)
texts      SmolLM2 on argparse.py, a document and the bible at 7.9K tokens: recall of attention's mass, KL and top-1 agreement
kv         the same KL where all blocks are attended to, held as Q8_0 and Q4_0
passkey    SmolLM2 is asked for a number that stands in 1K and 2K tokens of filler

Failures are printed as they are. Texts that aren't at hand are said to be missing: `apt-get install bible-kjv bible-kjv-text` has
the bible.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quality_retrieval as retrieval
import quality_texts as text
import torch
from common import demo_weights, machine

import ktopt
from ktopt.cli.table import Column, layout
from ktopt.source import SourceFile
from ktopt.weights.tokenizer import find_tokenizer

TYPES = {"KEY_INT4": 1, "QUEST": 2, "DYNAMIC": 1, "BLOCK_MEAN": 1, "BLOCK_MAX": 1, "FIXED": 1}
"""Types of anchors, and how many of each."""
BUDGETS = [96, 64, 32, 16, 8]
TEXT_TOKENS, PICKED_TOKENS, LOCAL_TOKENS = 7936, 1024, 512
QUERIES = 48
BLOCKS = (128, 32)
RULES = """
version: 1
dtype: float32
rules:
  - {{match: "@model.layers.*.self_attn", replace: KDynamicAttention, kwargs: {settings}}}
"""


def retrieval_rows(tokens: int, block: int) -> list[list[str]]:
    rows = []
    for kind in ("isotropic", "topics", "filler"):
        hay = retrieval.haystack(kind, tokens, block)
        hits, mass = retrieval.full_attention(hay)
        rows.append([kind, "full attention", "", f"{hits} of 64, mass {mass:.6f}"])
        for name, number in TYPES.items():
            for asked in ("prompt", "later") if name in ("DYNAMIC", "KEY_INT4") else ("later",):
                found = retrieval.found(hay, name, number, BUDGETS, asked)
                rows.append(
                    [kind, name, asked, "  ".join(f"{budget}: {hit:2}" for budget, hit in zip(BUDGETS, found, strict=True))]
                )
                print("  ".join(rows[-1]), flush=True)
    return rows


def model_with(settings: dict[str, Any] | None) -> Any:
    """SmolLM2 in float32: its attention choosing blocks by the settings, or transformers' own."""
    file = demo_weights()
    if settings is None:
        rules = "version: 1\ndtype: float32\nrules: [{match: '@**', replace: default}]\n"
    else:
        rules = RULES.format(settings=json.dumps(settings))
    return ktopt.apply(SourceFile("quality.yaml", rules), file, file)


def choosing(anchor_type: str, number: int, block: int, **others: Any) -> dict[str, Any]:
    """Settings: the budget of this benchmark, keys and values as they are."""
    return {
        "max_seq_len": 8192, "block_size": block, "local_windows_len": LOCAL_TOKENS, "second_select_num": PICKED_TOKENS // block,
        "anchor_type": anchor_type, "anchor_num": number, "kv_type": "FP32", "dense_layer_num": 0, "preselect_block": False,
        "chunk_size": 512, **others,
    }  # fmt: skip


def text_rows(ids: dict[str, torch.Tensor], steps: int, types: dict[str, int]) -> list[list[str]]:
    plain = model_with(None)
    layers, full = {}, {}
    for name, ids_1N in ids.items():
        with text.queries_and_keys(plain, QUERIES) as seen, torch.inference_mode():
            plain(ids_1N, logits_to_keep=1)
        layers[name] = list(seen)
        full[name] = text.log_probabilities(plain, ids_1N, steps)
    del plain
    rows = []
    for block in BLOCKS:
        recall = {
            shared: _mean(
                [text.recalls(each, block, PICKED_TOKENS, LOCAL_TOKENS, _named(types), shared) for each in layers.values()]
            )
            for shared in (True, False)
        }
        model = model_with(choosing("DYNAMIC", TYPES["DYNAMIC"], block))
        told = [text.divergences(full[each], model, ids[each], steps, types) for each in ids]
        for name in ("local", *types, "oracle"):
            kl, top = (sum(each[name][i] for each in told) / len(told) for i in (0, 1))
            rows.append([str(block), name, f"{recall[True][name]:.4f}", f"{recall[False][name]:.4f}", f"{kl:.4f}", f"{top:.3f}"])
            print("  ".join(rows[-1]), flush=True)
    return rows


def _named(types: dict[str, int]) -> dict[str, tuple[str, int]]:
    return {name: (name, number) for name, number in types.items()}


def _cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def kv_rows(ids: dict[str, torch.Tensor], steps: int) -> list[list[str]]:
    plain = model_with(None)
    full = {name: text.log_probabilities(plain, each, steps) for name, each in ids.items()}
    del plain
    rows = []
    for kind in ("FP16", "BF16", "Q8_0", "Q4_0"):
        model = model_with(choosing("QUEST", 2, 128, kv_type=kind, second_select_num=64))
        found = [text.compare(full[each], text.log_probabilities(model, ids[each], steps)) for each in ids]
        rows.append([kind, f"{sum(k for k, _ in found) / len(found):.5f}", f"{sum(t for _, t in found) / len(found):.3f}"])
        print("  ".join(rows[-1]), flush=True)
    return rows


INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about the "
    "important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def passkey_prompt(tokenizer: Any, tokens: int, at: float, key: int) -> torch.Tensor:
    """The usual prompt, of about so many tokens, with the key at a share of its length."""
    line = f"The pass key is {key}. Remember it. {key} is the pass key. "
    repeats = max(2, (tokens - 130) // len(tokenizer.encode(FILLER, add_special_tokens=False)))
    before = round(repeats * at)
    story = FILLER * before + line + FILLER * (repeats - before)
    return torch.tensor([tokenizer.encode(f"{INTRO}{story}\nWhat is the pass key? The pass key is")])


@torch.inference_mode()
def passkeys(model: Any, tokenizer: Any, tokens: int, make: Callable[[], Any]) -> int:
    """How many of five keys the model tells."""
    dice, told = random.Random(0), 0
    for at in (0.1, 0.3, 0.5, 0.7, 0.9):
        key = dice.randint(10000, 99999)
        ids_1N = passkey_prompt(tokenizer, tokens, at, key)
        cache, answer = make(), []
        for part in ids_1N.split(512, dim=1):
            logits = model(part, cache=cache, use_cache=True, logits_to_keep=1).logits
        for _ in range(12):
            answer.append(int(logits[0, -1].argmax()))
            logits = model(torch.tensor([answer[-1:]]), cache=cache, use_cache=True).logits
        told += str(key) in tokenizer.decode(answer)
    return told


def passkey_rows(tokenizer: Any) -> list[list[str]]:
    rows = []
    kinds: dict[str, Any] = {"dense": None}
    kinds |= {name: choosing(name, TYPES[name], 32, local_windows_len=128, second_select_num=8) for name in ("KEY_INT4", "QUEST")}
    for name, settings in kinds.items():
        model = model_with(settings)
        told = [passkeys(model, tokenizer, tokens, lambda m=model: _cache(m)) for tokens in (1024, 2048)]
        rows.append([name, *(f"{each} of 5" for each in told)])
        print("  ".join(rows[-1]), flush=True)
    return rows


def _mean(many: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in many) / len(many) for name in many[0]}


HEADS = {
    "retrieval": ["keys", "anchors", "question", "needles of 64 at each budget of blocks"],
    "texts": ["block", "anchors", "recall, shared", "recall, separate", "KL", "top-1"],
    "kv": ["kv_type", "KL", "top-1"],
    "passkey": ["attention", "1K", "2K"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What choosing blocks costs in quality.")
    parser.add_argument("--parts", nargs="+", choices=HEADS, default=list(HEADS), help="default: all")
    parser.add_argument("--tokens", type=int, default=139_264, help="constructed keys (default 139264)")
    parser.add_argument("--bible-folder", type=Path, help="where Debian's bible-kjv packages were unpacked (default: installed)")
    parser.add_argument("--text-tokens", type=int, default=TEXT_TOKENS, help=f"tokens of each text (default {TEXT_TOKENS})")
    parser.add_argument("--steps", type=int, default=160, help="tokens of each text that are read one by one (default 160)")
    parser.add_argument("--anchors", nargs="+", choices=TYPES, default=list(TYPES), help="of the part `texts`; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    options = parser.parse_args()
    tokenizer: Any = find_tokenizer((demo_weights(),))
    found = text.texts(text.bible_command(options.bible_folder))
    print("texts: " + ", ".join(found) + "".join(f"; missing: {name}" for name in ("docs", "bible") if name not in found))
    ids = {name: text.ids_of(tokenizer, each, options.text_tokens) for name, each in found.items()}
    made = {}
    for part in options.parts:
        print(f"\n{part}")
        rows = {
            "retrieval": lambda: retrieval_rows(options.tokens, 128),
            "texts": lambda: text_rows(ids, options.steps, {name: TYPES[name] for name in options.anchors}),
            "kv": lambda: kv_rows(ids, options.steps),
            "passkey": lambda: passkey_rows(tokenizer),
        }[part]()
        made[part] = rows
        print(layout([Column(head) for head in HEADS[part]], rows, 140))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "heads": HEADS, "rows": made}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
