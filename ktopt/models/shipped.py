"""The well-known models whose trees ship with ktopt, so that checking and planning them needs neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ktopt.diagnostics import UsageError
from ktopt.models import treefile
from ktopt.operator import nearest

FOLDER = Path(__file__).parent
SUFFIX = ".json.gz"

ALSO_CALLED = {"deepseek-r1": "deepseek-v3"}
"""Names of models that have another's architecture and configuration."""

NO_MATTER = {
    "_name_or_path", "attention_dropout", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range",
    "quantization_config", "transformers_version", "use_cache",
}  # fmt: skip
"""Config keys that change no module and nothing that a plan asks of a config."""


@cache
def known_models() -> tuple[str, ...]:
    """Every name that `--model` takes without a file, sorted."""
    files = {path.name.removesuffix(SUFFIX) for path in FOLDER.glob(f"*{SUFFIX}")}
    return tuple(sorted(files | ALSO_CALLED.keys()))


def model_config(name: str) -> dict[str, Any]:
    """The config.json of a shipped model, as its authors published it. UsageError for an unknown name."""
    config: dict[str, Any] = read(name)["config"]
    return config


def read(name: str) -> dict[str, Any]:
    """A shipped model's file: `config`, `name`, `hf_repo`, `transformers` (the version that built it), and its tree."""
    if name not in known_models():
        raise unknown_model(name)
    path = FOLDER / (ALSO_CALLED.get(name, name) + SUFFIX)
    return treefile.unpack(path.read_bytes())


def unknown_model(name: str) -> UsageError:
    """The error for a name that is neither shipped nor a file."""
    wanted = name.rpartition("/")[2].lower()
    near = nearest(wanted, known_models()) or next((k for k in known_models() if k.startswith(wanted) or wanted.startswith(k)), "")
    meant = f"; did you mean {near}?" if near else ""
    return UsageError(
        f"unknown model {name!r}{meant}\n"
        f"A model is a folder with a config.json, a config.json, a GGUF file, or one of {', '.join(known_models())}"
    )


def find_same(config: Mapping[str, Any], transformers_version: str) -> str | None:
    """The shipped model that has this configuration, where the installed transformers is the version that built its tree."""
    wanted = essence(config)
    for name in known_models():
        if name in ALSO_CALLED:
            continue
        data = read(name)
        if data["transformers"] == transformers_version and essence(data["config"]) == wanted:
            return name
    return None


def essence(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the keys that change no module, with the dtype under its new name."""
    kept = {key: value for key, value in config.items() if key not in NO_MATTER}
    if "torch_dtype" in kept:
        kept["dtype"] = kept.pop("torch_dtype")
    return kept
