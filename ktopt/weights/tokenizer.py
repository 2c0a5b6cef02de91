"""The tokenizer that belongs to a model: from the files beside its weights or config, or from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import KtoptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What a tokenizer may consist of in a model's folder."""

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARIES)


def find_tokenizer(places: Iterable[Any]) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the first of these that has one: a folder with tokenizer files (or a config.json or safetensors file in
    it), a GGUF file, a folder with a GGUF file.

    Anything else among them (a shipped name, an open source, None) is passed over. None where there is no tokenizer at all;
    KtoptError where it can't be read.
    """
    for place in places:
        path = Path(place) if isinstance(place, (str, Path)) else None
        if path is None or not path.exists():
            continue
        if path.suffix in (".json", ".safetensors"):
            path = path.parent
        if path.is_dir() and has_tokenizer(path):
            from transformers import AutoTokenizer

            try:
                found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            except (OSError, ValueError, KeyError) as error:
                raise KtoptError(f"{path}: its tokenizer can't be read: {error}") from error
            return found
        gguf = path if path.suffix == ".gguf" else next(iter(sorted(path.glob("*.gguf"))), None)
        if gguf is not None:
            from ktopt.weights.gguf_tokenizer import tokenizer_from_gguf

            return tokenizer_from_gguf(gguf)
    return None


def stop_tokens(own: int | list[int] | None, tokenizer: Any) -> list[int] | None:
    """Tokens that end an answer: `own`, which is the eos_token_id of a generation config, and the tokenizer's, which knows a chat's
    end where the config doesn't. None where neither says any."""
    ends = [*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id]
    return list(dict.fromkeys(token for token in ends if token is not None)) or None
