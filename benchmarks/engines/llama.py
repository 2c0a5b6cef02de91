"""llama.cpp on one GGUF file, through llama-cpp-python's low-level API, as llama-bench drives it: benchmarks/cpu.py runs this in a
process of its own and reads the JSON that it prints. Tokens are random, so that no time goes into choosing them; the logits of
the last position alone are computed.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np
from sizes import BATCH, UNITS, Task, peak_bytes, read_task


class Engine:
    def __init__(self, task: Task) -> None:
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, None)
        self.model = llama_cpp.llama_model_load_from_file(task.model.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp can't load {task.model}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = task.context
        params.n_batch, params.n_ubatch = BATCH, UNITS
        params.n_threads = params.n_threads_batch = task.threads
        params.flash_attn_type = int(task.variant == "flash")
        params.swa_full = False
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.random = np.random.default_rng(0)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def read(self, tokens: int) -> None:
        ids = self.random.integers(0, self.vocabulary, tokens).astype(np.int32)
        for start in range(0, tokens, BATCH):
            part = np.ascontiguousarray(ids[start : start + BATCH])
            batch = llama_cpp.llama_batch_get_one(part.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(part))
            if llama_cpp.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(self.context)

    def decode(self, tokens: int) -> None:
        for _ in range(tokens):
            self.read(1)


def main() -> None:
    task = read_task(sys.argv[1])
    if task.baseline:
        llama_cpp.llama_backend_init()
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
        if depth:
            engine.read(depth)
        engine.decode(2)
        timed("decode", task.decode, depth, engine.decode)
    peak = peak_bytes()
    print(json.dumps({"results": rows, "peak_bytes": peak, "version": f"llama-cpp-python {version('llama-cpp-python')}"}))


if __name__ == "__main__":
    main()
