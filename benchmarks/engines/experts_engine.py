"""One engine's MoE layers, timed in a process of their own: the child of benchmarks/experts.py. Only ktopt's own engine imports
ktopt, so that another interpreter can run the others.

    python experts_engine.py ENGINE FILE CASES THREADS RESULT
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(T, H) bfloat16, (T, K) int64, (T, K) float32 to (T, H)."""
SECONDS = 0.8
"""How long one number of tokens is timed, at least MEASURED calls."""
MEASURED = 9


def tensors_of(file: Path) -> list[dict[str, tuple[str, Any, Any]]]:
    """Each layer's (type, shape, bytes) by "gate", "up" and "down"."""
    from gguf import GGUFReader

    layers: dict[int, dict[str, tuple[str, Any, Any]]] = {}
    for tensor in GGUFReader(file).tensors:
        _, number, name, _ = tensor.name.split(".")
        shape = tuple(int(size) for size in reversed(tensor.shape))
        layers.setdefault(int(number), {})[name.split("_")[1]] = (tensor.tensor_type.name, shape, tensor.data)
    return [layers[number] for number in sorted(layers)]


def ktopt_layers(file: Path, threads: int) -> list[Layer]:
    """ktopt's call of KExpertsCPU."""
    from ktopt.kernels import cpu
    from ktopt.kernels.cpu.experts import Experts

    def layer(parts: Any) -> Layer:
        def matrix(name: str) -> cpu.Blocks:
            kind, (count, rows, columns), data = parts[name]
            return cpu.blocks(kind, count * rows, columns, np.ascontiguousarray(data), threads)

        experts = Experts(parts["gate"][1][0], (matrix("gate"), matrix("up")), (matrix("down"),), "silu")

        def call(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.empty(x.shape, dtype=torch.float32)
            experts(x, index, weights, out, threads)
            return out.to(x.dtype)

        return call

    return [layer(parts) for parts in tensors_of(file)]


def torch_layers(file: Path, threads: int, implementation: str) -> list[Layer]:
    """transformers' experts in bfloat16."""
    import transformers
    from gguf import GGMLQuantizationType, quants

    def layer(parts: Any) -> Layer:
        count, inner, hidden = parts["gate"][1]
        config = transformers.Qwen3MoeConfig(
            num_experts=count, hidden_size=hidden, moe_intermediate_size=inner, num_hidden_layers=1, vocab_size=8,
            num_attention_heads=1, num_key_value_heads=1, intermediate_size=8,
        )  # fmt: skip
        model = transformers.Qwen3MoeForCausalLM._from_config(config, experts_implementation=implementation, dtype=torch.bfloat16)
        experts = model.model.layers[0].mlp.experts.eval()

        def numbers(name: str) -> torch.Tensor:
            kind, shape, data = parts[name]
            return torch.from_numpy(quants.dequantize(data, GGMLQuantizationType[kind])).view(shape)

        with torch.no_grad():
            experts.gate_up_proj.copy_(torch.cat((numbers("gate"), numbers("up")), dim=1))
            experts.down_proj.copy_(numbers("down"))
        return lambda x, index, weights: experts(x, index, weights.to(x.dtype))

    torch.set_num_threads(threads)
    return [layer(parts) for parts in tensors_of(file)]


def kt_layers(file: Path, threads: int) -> list[Layer]:
    """kt-kernel's LLAMAFILE method. Its wrapper asks for pinned memory, which a torch without CUDA refuses."""
    os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"
    for name in ("zeros", "empty", "full"):
        unpinned(name)
    from kt_kernel import KTMoEWrapper

    layers = []
    for number, parts in enumerate(tensors_of(file)):
        count, inner, hidden = parts["gate"][1]
        wrapper = KTMoEWrapper(
            layer_idx=number, num_experts=count, num_experts_per_tok=CHOSEN, hidden_size=hidden, moe_intermediate_size=inner,
            gpu_experts_mask=torch.zeros(count, dtype=torch.bool), cpuinfer_threads=threads, threadpool_count=1,
            weight_path=str(file), chunked_prefill_size=1024, method="LLAMAFILE",
        )  # fmt: skip
        wrapper.load_weights(torch.arange(count, dtype=torch.int32))
        layers.append(lambda x, index, weights, run=wrapper: run.forward(x, index, weights, None))
    return layers


CHOSEN = 8


def unpinned(name: str) -> None:
    make = getattr(torch, name)
    setattr(torch, name, lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs))


def engine_layers(engine: str, file: Path, threads: int) -> list[Layer]:
    if engine == "ktopt":
        return ktopt_layers(file, threads)
    if engine == "kt-kernel":
        return kt_layers(file, threads)
    return torch_layers(file, threads, engine.removeprefix("torch "))


@torch.no_grad()
def measure(layers: list[Layer], cases: Any) -> dict[str, Any]:
    """Milliseconds of each number of tokens, the layers in turn so that weights come from memory; and the first layer's error."""
    taken: dict[str, list[float]] = {}
    for tokens in cases["tokens"]:
        x = torch.from_numpy(cases["x"])[:tokens].bfloat16()
        choices = [torch.from_numpy(index)[:tokens].contiguous() for index in cases["index"]]
        weights = torch.from_numpy(cases["weights"])[:tokens].contiguous()
        spent, calls, times = 0.0, 0, []
        while spent < SECONDS or len(times) < MEASURED:
            start = time.perf_counter()
            layers[calls % len(layers)](x, choices[calls % len(choices)], weights)
            seconds = time.perf_counter() - start
            calls += 1
            if calls > len(layers):  # each layer once before it counts
                times.append(seconds * 1e3)
                spent += seconds
        taken[str(tokens)] = times
    few = len(cases["expected"])
    x, index = torch.from_numpy(cases["x"])[:few].bfloat16(), torch.from_numpy(cases["index"][0])[:few].contiguous()
    found = layers[0](x, index, torch.from_numpy(cases["weights"])[:few].contiguous()).double()
    expected = torch.from_numpy(cases["expected"])
    return {"ms": taken, "error": float((found - expected).norm() / expected.norm())}


def main() -> None:
    engine, file, cases, threads = sys.argv[1], Path(sys.argv[2]), dict(np.load(sys.argv[3])), int(sys.argv[4])
    torch.set_num_threads(threads)
    said = measure(engine_layers(engine, file, threads), {**cases, "tokens": cases["tokens"].tolist()})
    Path(sys.argv[5]).write_text(json.dumps(said))  # engines print what they like


if __name__ == "__main__":
    main()
