"""Latent attention of DeepSeek-V3's dimensions: the memory that a chunk of a prompt takes, measured and by the plan's formula, and
how long decoding attends.

    python benchmarks/mla.py [--contexts 4096,16384] [--chunks 1024] [--decode 4096,16384] [--json FILE] [--plot FILE.svg]

Memory is counted as tensors come and go while one attention layer computes the last chunk of a context, beside its weights, its
input and the cache; what an operation takes inside itself is not in it.

What a GPU would take is counted for all contexts to 139,264 tokens on tensors without numbers: the module runs with a GPU's tiles,
and every operation makes its result's shape and nothing else. On the CPU the module really runs, at --contexts and --chunks: 128
heads on few cores take long for long ones. Decoding is the CPU kernel's attention alone, of 12 layers with 16 heads (the small
model of the other benchmarks) and of one of V3's.
"""

from __future__ import annotations

import argparse
import json
import time
import weakref
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mla_plot import memory_plot
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from ktopt.cache.latent import PAGE_TOKENS, LatentLayer
from ktopt.kernels.cpu import latent
from ktopt.operator import build_config
from ktopt.operators.latent_memory import LatentSizes, prefers_absorbed, transient_bytes
from ktopt.operators.modules.attention_mla import KDeepseekV2Attention
from ktopt.registry import find

V3 = LatentSizes(heads=128, nope=128, rope=64, value=128, latent=512, hidden=7168)
WAYS: dict[str, Any] = {"absorbed": True, "expanded": False, "auto": "auto"}
GPU_CONTEXTS = (4096, 8192, 20_480, 65_536, 139_264)
GPU_CHUNKS = (8192, 4096, 1024)
ITEM = 2
HEADINGS = "way        chunk   context  measured MB  formula MB  ratio  seconds"


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were alive at once among those made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), known)
        return made

    def _count(self, storage: Any, known: set[int]) -> None:
        key, size = id(storage), storage.nbytes()
        if key in known or key in self._alive:
            return

        def gone(_: Any) -> None:
            self.now -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def attention(way: str, chunk: int, device: str) -> Any:
    """One layer's attention in bfloat16, with random weights, or on the meta device without any."""
    config = DeepseekV3Config(num_hidden_layers=1)
    with torch.device("meta"):
        original = DeepseekV3Attention(config, 0).bfloat16().eval().requires_grad_(False)
    if device != "meta":
        original = original.to_empty(device=device)
        for parameter in original.parameters():
            parameter.normal_(std=0.02)
    settings, _ = build_config(find("KDeepseekV2Attention"), {"absorb_for_prefill": WAYS[way], "chunk_size": chunk})  # type: ignore[arg-type]
    context = SimpleNamespace(step=SimpleNamespace(path="model.layers.0.self_attn"), config=settings)
    return KDeepseekV2Attention.build(original, context)  # type: ignore[arg-type]


def filled(tokens: int, room: int, device: str) -> LatentLayer:
    """A cache of so many random tokens, with memory for those to come."""
    held = LatentLayer(max_tokens=-(-room // PAGE_TOKENS) * PAGE_TOKENS)
    held.start(1, V3.latent, V3.rope, torch.bfloat16, torch.device(device))
    if tokens:
        held.append(torch.randn(1, tokens, V3.token_numbers, dtype=torch.bfloat16, device=device))
    return held


def measure(way: str, chunk: int, context: int, device: str) -> dict[str, Any]:
    """The last chunk of a context: bytes measured and by the formula, and seconds. On "meta", with a GPU's tiles and formula."""
    chunk = min(chunk, context)
    module, held = attention(way, chunk, device), filled(context - chunk, context, device)
    x = torch.randn(1, chunk, V3.hidden, dtype=torch.bfloat16, device=device)
    angles = torch.randn(1, chunk, V3.rope, device=device)
    embeddings = (angles.cos().bfloat16(), angles.sin().bfloat16())
    holder = SimpleNamespace(offloading=False, layer_class_to_replicate=None, layers=[held])
    start = time.perf_counter()
    with torch.no_grad(), Peak() as peak:
        module(hidden_states=x, position_embeddings=embeddings, attention_mask=None, cache=holder)
    seconds = time.perf_counter() - start
    absorbed = way == "absorbed" or (way == "auto" and prefers_absorbed(chunk, context, V3))
    formula = transient_bytes(V3, chunk, context, absorbed, ITEM, "cuda" if device == "meta" else device)
    return {"way": way, "chunk": chunk, "context": context, "measured": peak.most, "formula": formula, "seconds": seconds}


def told(row: dict[str, Any]) -> str:
    return (
        f"{row['way']:<9}{row['chunk']:>7}{row['context']:>10,}{row['measured'] / 1e6:>13.1f}{row['formula'] / 1e6:>12.1f}"
        f"{row['measured'] / row['formula']:>7.2f}{row['seconds']:>9.2f}"
    )


def measured(chunks: Iterable[int], contexts: Iterable[int], device: str) -> list[dict[str, Any]]:
    """All ways, printed as they come; a chunk longer than the context is the context."""
    print(HEADINGS)
    rows = []
    sizes = [(chunk, context) for chunk in chunks for context in contexts if chunk <= context or chunk == min(chunks)]
    for way, (chunk, context) in product(WAYS, sizes):
        rows.append(measure(way, chunk, context, device))
        print(told(rows[-1]), flush=True)
    return rows


def decode(context: int, heads: int, layers: int, threads: int) -> float:
    """Milliseconds of the attention of one token on a bfloat16 cache, the best of some runs."""
    pages = -(-context // 64)
    caches = [torch.randn(pages, 64, V3.token_numbers).bfloat16() for _ in range(layers)]
    table, rows = torch.arange(pages, dtype=torch.int32)[None], torch.tensor([[0, 0, context]])
    query = torch.randn(1, heads, V3.token_numbers)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        for each in caches:
            latent.latent_attention(query, each, "BF16", table, rows, V3.latent, 0.07, threads)
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=numbers, default=[4096, 16_384], help="contexts to measure memory at")
    parser.add_argument("--chunks", type=numbers, default=[1024], help="chunks there")
    parser.add_argument("--decode", type=numbers, default=[4096, 16_384], help="contexts to time decoding at")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what a GPU takes, as SVG")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("on a GPU, counted on tensors without numbers")
    gpu = measured(GPU_CHUNKS, GPU_CONTEXTS, "meta")
    print("\non the CPU, run")
    cpu = measured(args.chunks, args.contexts, "cpu")
    if args.plot:
        args.plot.write_text(memory_plot(gpu), encoding="utf-8")
    timed = [
        {"context": t, "heads": heads, "layers": layers, "ms": decode(t, heads, layers, args.threads)}
        for heads, layers in ((16, 12), (128, 1))
        for t in args.decode
    ]
    print("\ndecoding, attention alone")
    for row in timed:
        print(f"{row['layers']:>3} layers of {row['heads']:>3} heads after {row['context']:>7,} tokens: {row['ms']:.2f} ms")
    if args.json:
        args.json.write_text(json.dumps({"gpu": gpu, "cpu": cpu, "decode": timed}, indent=1))


if __name__ == "__main__":
    main()
