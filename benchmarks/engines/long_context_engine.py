"""ktopt's long contexts on SmolLM2: benchmarks/long_context.py runs this in a process of its own, with a JSON of what to measure,
and reads the JSON that it prints.

Caches are filled with random keys and values, as if a prompt had been read, but for the tasks that measure reading, and that which
measures memory: it reads the text whose tokens are in the file that the task names. The `forced` task draws each layer's blocks by
itself, 19 of 20 from those in memory, and reads the rest from disk past the page cache.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sizes import peak_bytes

import ktopt
from ktopt.kernels.blocks import CacheSegments, attend
from ktopt.operators.modules import block_attention, block_cache, block_choice
from ktopt.operators.modules.block_layer import block_cache as blocks_of
from ktopt.runtime.benchmark import baseline_bytes
from ktopt.runtime.decoding import Decoder
from ktopt.runtime.memory import return_large_blocks
from ktopt.source import SourceFile

POOL_TOKENS, PIECE_TOKENS = 1 << 16, 4096
RULE = """
  - id: attention
    match: "@model.layers.*.self_attn"
    replace: KDynamicAttention
    kwargs: {}
"""
WARM = 4


def load(task: dict[str, Any]) -> Any:
    """SmolLM2 by the shipped rules, its attention by the task's settings."""
    rules = Path(task["rules"]).read_text(encoding="utf-8") + RULE.format(json.dumps(task["settings"]))
    return ktopt.apply(SourceFile("long_context.yaml", rules), task["model"], task["model"])


def filled(decoder: Decoder, tokens: int) -> Any:
    """A cache with so many tokens of random keys and values in every layer."""
    cache = decoder.new_cache()
    decoder.step(torch.tensor([[1]]), cache)
    random = torch.Generator().manual_seed(0)
    shape = cache.layers[0].window.keys.shape
    pool = torch.randn(2, 1, shape[1], POOL_TOKENS, shape[3], generator=random)
    for layer in cache.layers:
        while (more := min(PIECE_TOKENS, tokens - layer.get_seq_length())) > 0:
            at = int(torch.randint(POOL_TOKENS - more, (1,), generator=random))
            layer.append(*(each[:, :, at : at + more] for each in pool))
            layer.leave()
    return cache


def read(decoder: Decoder, ids_1N: torch.Tensor) -> Any:
    """A cache that has read a text."""
    cache = decoder.new_cache()
    decoder.read(ids_1N, cache)
    return cache


def decode(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each token after a filled cache, or after a text that was read, and the tokens."""
    if task.get("direct"):
        block_cache.DiskTier = functools.partial(block_cache.DiskTier, direct=True)  # type: ignore[attr-defined, misc]
    decoder = Decoder(load(task))
    tokens = task["context"]
    cache = (
        read(decoder, torch.tensor([json.loads(Path(task["text"]).read_bytes())])) if "text" in task else filled(decoder, tokens)
    )
    shared = blocks_of(cache)
    if task.get("forced"):
        _force(shared, task["forced"])
    token, seconds, made = torch.tensor([[1]]), [], []
    for _ in range(WARM):
        token = decoder.step(token, cache)
    moved = _read_bytes()
    for _ in range(task["decode"]):
        start = time.perf_counter()
        token = decoder.step(token, cache)
        seconds.append(time.perf_counter() - start)
        made.append(int(token))
    said = {"tokens_per_s": 1 / statistics.median(seconds), "mean_tokens_per_s": len(seconds) / sum(seconds), "tokens": made}
    said["read_bytes_per_token"] = (_read_bytes() - moved) / len(seconds)
    said["statistics"] = [list(map(str, row)) for row in shared.statistics.table()]
    if "text" in task:
        said["baseline_bytes"] = baseline_bytes()
    shared.close()
    return said


def _force(shared: Any, resident: float) -> None:
    """Draw picks anew for each layer and token: a share of them in memory, the others on disk."""
    random = torch.Generator().manual_seed(1)

    def drawn(held: Any, q_RHD: torch.Tensor, count: int, allowed: Any, ends: Any) -> torch.Tensor:
        there_RM = shared.store.addresses[held.number, :, : held.middle] != 0
        noise_RM = torch.rand(there_RM.shape, generator=random)
        many = round(count * resident)
        inside = torch.where(there_RM, noise_RM, -1.0).topk(many, dim=1).indices
        outside = torch.where(there_RM, -1.0, noise_RM).topk(count - many, dim=1).indices
        return torch.cat((inside, outside), dim=1).sort(dim=1).values.int()

    block_choice._best = drawn  # type: ignore[assignment]


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def prefill(task: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of reading random tokens."""
    decoder = Decoder(load(task))
    decoder.read(torch.randint(1000, (1, 512)), decoder.new_cache())
    cache = decoder.new_cache()
    ids = torch.randint(1000, 40_000, (1, task["context"]), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    decoder.read(ids, cache)
    seconds = time.perf_counter() - start
    blocks_of(cache).close()
    return {"tokens_per_s": task["context"] / seconds, "seconds": seconds}


def attention(task: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of one layer's attention, choosing included: with each number of blocks, and dense by several ways."""
    decoder = Decoder(load(task))
    cache = filled(decoder, task["context"])
    layers, shape = cache.layers, cache.layers[0].window.keys.shape
    heads = decoder.model.config.num_attention_heads
    q_BN1D = torch.randn(1, heads, 1, shape[3])
    made = {}
    for blocks in task["blocks"]:
        object.__setattr__(blocks_of(cache).settings, "second_select_num", blocks)
        made[f"{blocks} blocks"] = _per_layer(layers, lambda held: block_attention.decode(held, q_BN1D))
    blocks_of(cache).close()
    del cache, layers
    return {"ms": made | _dense(q_BN1D, shape[1], task["context"])}


def _dense(q_BN1D: torch.Tensor, kv_heads: int, tokens: int) -> dict[str, float]:
    """ktopt's own attention over a cache in one piece, torch's scaled_dot_product_attention, and two matrix products."""
    dim, scale = q_BN1D.shape[3], q_BN1D.shape[3] ** -0.5
    caches = [[torch.randn(kv_heads, tokens, dim).bfloat16() for _ in range(2)] for _ in range(4)]
    q_RHD = q_BN1D.view(kv_heads, -1, dim)

    def ours(pair: Any) -> None:
        attend(q_RHD, [CacheSegments(pair[0], pair[1], 0, tokens, None)], value_dim=dim, scale=scale)

    def sdpa(pair: Any) -> None:
        torch.nn.functional.scaled_dot_product_attention(
            q_BN1D.bfloat16(), pair[0][None], pair[1][None], scale=scale, enable_gqa=True
        )

    def products(pair: Any) -> None:
        weights = (q_RHD.bfloat16() @ pair[0].transpose(1, 2)).float().mul_(scale).softmax(-1)
        weights.bfloat16() @ pair[1]

    found = {"dense, ktopt": _per_layer(caches, ours), "dense, sdpa": _per_layer(caches, sdpa, 3)}
    found["dense, two products"] = _per_layer(caches, products, 3)
    found["bytes of a dense layer, MB"] = 2 * caches[0][0].nbytes / 1e6
    return found


def _per_layer(layers: list[Any], run: Callable[[Any], Any], rounds: int = 8) -> float:
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        for layer in layers:
            run(layer)
        taken.append((time.perf_counter() - start) / len(layers) * 1e3)
    return statistics.median(taken)


@torch.inference_mode()
def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    torch.manual_seed(0)
    return_large_blocks()  # as ktopt's commands do
    tasks = {"decode": decode, "prefill": prefill, "attention": attention}
    said = tasks[task["what"]](task)
    print(json.dumps(said | {"peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
