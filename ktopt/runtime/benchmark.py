"""How fast a model prefills and decodes, as llama-bench counts it: `ktopt bench` prints it.

Prefill reads random tokens and computes the logits of the last position. Decode takes the likeliest token, again and again, after
`depth` tokens, which are read once and untimed. Each is begun once to warm up, then repeated.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ktopt.diagnostics import UsageError
from ktopt.runtime.decoding import Decoder, Prefix, cache_bytes
from ktopt.runtime.foreign_load import ForeignLoad
from ktopt.runtime.generation import context_tokens

WARM_UP_PROMPT, WARM_UP_TOKENS = 512, 8
"""Read and decoded, at most, before the first repeat."""
BASELINE = "a fresh process that imported the same modules and multiplied two small matrices"
_BASELINE_CODE = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception:
        pass
import torch
from ktopt.runtime.memory import peak_own_bytes
torch.ones(8, 8) @ torch.ones(8, 8)
print(peak_own_bytes())
"""


@dataclass(frozen=True)
class Row:
    """One measurement.

    phase            "prefill" or "decode"
    n                tokens read, or made
    depth            tokens in the cache before them
    tokens_per_s     the median of `repeats`; `low` and `high` are the least and the most, `mad` the median absolute deviation
    foreign_cores    cores that other processes used meanwhile, on average; None where the system doesn't say
    cache_bytes      what the cache held at the end
    """

    phase: str
    n: int
    depth: int
    tokens_per_s: float
    low: float
    high: float
    mad: float
    repeats: tuple[float, ...]
    foreign_cores: float | None
    cache_bytes: int

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    model: Any, prefill: Sequence[int], decode: int, depths: Sequence[int], repeats: int, *, seed: int = 0
) -> Iterator[Row]:
    """The rows, each when it is measured: a prefill of each length, then `decode` tokens (none for 0) after each depth.

    Tokens are drawn with `seed`. UsageError, before anything is measured, where the model's context is shorter than asked for.
    """
    context = context_tokens(model)
    most = max([*prefill, *(depth + decode for depth in depths if decode)], default=0)
    if context is not None and most > context:
        raise UsageError(f"{most} tokens are asked for, and the model's context is {context}")
    return _rows(_Bench(model, repeats, seed), prefill, decode, depths)


def _rows(bench: _Bench, prefill: Sequence[int], decode: int, depths: Sequence[int]) -> Iterator[Row]:
    for n in prefill:
        yield bench.prefill(n)
    for depth in depths if decode else ():
        yield bench.decode(decode, depth)


class _Bench:
    """A model, how often to repeat, and where tokens come from."""

    def __init__(self, model: Any, repeats: int, seed: int) -> None:
        self.decoder, self.count = Decoder(model), repeats
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.random = torch.Generator().manual_seed(seed)

    def ids(self, tokens: int) -> torch.Tensor:
        return torch.randint(0, self.vocabulary, (1, tokens), generator=self.random).to(self.decoder.device)

    def prefill(self, n: int) -> Row:
        ids_1T = self.ids(n)

        def prefill(cache: Any) -> None:
            self.decoder.read(ids_1T, cache)

        self.decoder.step(ids_1T[:, :WARM_UP_PROMPT], self.decoder.new_cache())
        return self._row("prefill", n, 0, self.decoder.new_cache, prefill)

    def decode(self, n: int, depth: int) -> Row:
        step, first_11 = self.decoder.step, self.ids(1)
        prefix = Prefix(self.decoder, self.ids(depth))

        def decode(cache: Any, tokens: int = n) -> None:
            next_11 = first_11
            for _ in range(tokens):
                next_11 = step(next_11, cache)
                next_11.item()  # a runner looks at each token, too

        decode(prefix.cache(), min(n, WARM_UP_TOKENS))
        return self._row("decode", n, depth, prefix.cache, decode)

    def _row(self, phase: str, n: int, depth: int, prepare: Callable[[], Any], run: Callable[[Any], object]) -> Row:
        """Repeat: prepare a cache, then run on it, timed."""
        load, speeds, cache = ForeignLoad(), [], None
        for _ in range(self.count):
            cache = prepare()
            start = time.perf_counter()
            run(cache)
            speeds.append(n / (time.perf_counter() - start))
        middle = statistics.median(speeds)
        spread = statistics.median(abs(speed - middle) for speed in speeds)
        return Row(phase, n, depth, middle, min(speeds), max(speeds), spread, tuple(speeds), load.cores(), cache_bytes(cache))


def baseline_bytes() -> int:
    """Peak resident memory of BASELINE, in bytes; 0 where that process fails."""
    names = [name for name, module in list(sys.modules.items()) if getattr(module, "__spec__", None) and name != "__main__"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _BASELINE_CODE], input=json.dumps(names), capture_output=True, text=True, check=False
    )
    last = done.stdout.split()[-1:]
    return int(last[0]) if done.returncode == 0 and last and last[0].isdigit() else 0
