"""transformers on one GGUF file, or where its loader can't read that architecture, on random weights of the same shape, which take
as long: benchmarks/cpu.py runs this in a process of its own and reads the JSON that it prints.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from sizes import Task, peak_bytes, read_task
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.initialization import no_init_weights

from ktopt.weights.gguf_config import config_from_gguf

UNREADABLE = ("qwen3_moe", "deepseek_v2", "deepseek_v3")
"""Types of models whose GGUF files its loader refuses or misreads."""
SLOW_S = 0.25
"""A token that takes longer is decoded fewer times."""


class Engine:
    def __init__(self, task: Task) -> None:
        dtype, _, experts = task.variant.partition("/")
        config: Any = dict(config_from_gguf(task.model))
        kind = config.pop("model_type")
        self.loaded = kind not in UNREADABLE
        if self.loaded:
            path = Path(task.model)
            self.model = AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=getattr(torch, dtype), attn_implementation="sdpa"
            )
        else:
            config = AutoConfig.for_model(kind, **config)
            with no_init_weights():
                made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
            for tensor in made.parameters():
                _fill(tensor.data)
            self.model = made
        if experts:
            self.model.set_experts_implementation(experts)
        self.model.eval()
        self.clear()

    def clear(self) -> None:
        self.cache = DynamicCache(config=self.model.config)

    def read(self, tokens: int) -> None:
        ids = torch.randint(0, self.model.config.vocab_size, (1, tokens))
        self.next = self.model(ids, cache=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)

    def decode(self, tokens: int) -> None:
        for _ in range(tokens):
            self.next = self.model(self.next, cache=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)


def _fill(tensor: torch.Tensor) -> None:
    """Small random numbers, the same few over and over: denormal or huge ones would take their own time."""
    pool = torch.randn(1 << 16, dtype=torch.float32).mul(0.02).to(tensor.dtype)
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), pool.numel()):
        part = flat[start : start + pool.numel()]
        part.copy_(pool[: part.numel()])


@torch.inference_mode()
def main() -> None:
    task = read_task(sys.argv[1])
    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    if task.baseline:
        torch.ones(8, 8) @ torch.ones(8, 8)
        __import__(f"transformers.models.{task.variant}.modeling_{task.variant}")
        print(json.dumps({"peak_bytes": peak_bytes()}))
        return
    engine = Engine(task)
    rows: list[dict[str, Any]] = []

    def timed(phase: str, n: int, depth: int, run: Any) -> None:
        start = time.perf_counter()
        run(n)
        rows.append({"phase": phase, "n": n, "depth": depth, "tokens_per_s": n / (time.perf_counter() - start)})

    engine.read(task.warm_up)
    engine.decode(4)
    for n in task.prefill:
        engine.clear()
        timed("prefill", n, 0, engine.read)
    for depth in task.depths:
        engine.clear()
        engine.read(depth or 1)
        start = time.perf_counter()
        engine.decode(2)
        slow = (time.perf_counter() - start) / 2 > SLOW_S
        timed("decode", max(4, task.decode // 8) if slow else task.decode, depth, engine.decode)
    peak = peak_bytes()
    weights = "the file's" if engine.loaded else "random"
    print(
        json.dumps({"results": rows, "peak_bytes": peak, "version": f"transformers {transformers.__version__}", "weights": weights})
    )


if __name__ == "__main__":
    main()
