"""The tokenizer that goes with a plan's weights: files beside them or in the model's folder, or what a GGUF file holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ktopt.diagnostics import KtoptError
from ktopt.plan import Plan

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def tokenizer_for(weights: str, plan: Plan) -> Any:
    """A transformers tokenizer. KtoptError where there is none to be found."""
    found = find_tokenizer(weights, plan)
    if found is None:
        raise KtoptError(
            f"no tokenizer: {weights} holds none, and there is no tokenizer.json beside it. Put the model's tokenizer files "
            "into that folder, or give the model's folder as --model"
        )
    return found


def find_tokenizer(weights: str, plan: Plan) -> Any | None:
    """As tokenizer_for, but None where there is none."""
    for folder in _folders(Path(weights), Path(plan.model.source)):
        if any((folder / name).is_file() for name in FILES):
            from transformers import AutoTokenizer

            try:
                return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            except (OSError, ValueError, KeyError) as error:
                raise KtoptError(f"{folder}: its tokenizer can't be read: {error}") from error
    for file in _gguf_files(Path(weights), Path(plan.model.source)):
        from ktopt.weights.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(file)
    return None


def _folders(weights: Path, model: Path) -> Iterator[Path]:
    for path in (weights, model):
        if path.exists():
            yield path if path.is_dir() else path.parent


def _gguf_files(*places: Path) -> Iterator[Path]:
    """GGUF files; of a split one the first, which has the metadata."""
    for place in places:
        if place.suffix == ".gguf" and place.is_file():
            yield place
        elif place.is_dir():
            yield from sorted(place.glob("*.gguf"))[:1]
