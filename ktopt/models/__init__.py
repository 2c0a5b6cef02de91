"""What ktopt knows of model families, without torch: KTransformers' old names, what transformers can't run, and trees that ship.

One file per model_type declares a `FAMILY` (see family.py). The `<name>.json.gz` beside them are the trees of well-known models,
read by shipped.py and written by scripts/make_trees.py.
"""

from __future__ import annotations

import importlib
from functools import cache

from ktopt.models.family import Family

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "kimi_k2",
    "llama",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "smallthinker",
)
"""The model types that ktopt has something to say of; each is a file of this package."""

IN_EVERY_MODEL = {"transformers.activations.SiLUActivation": ("torch.nn.modules.activation.SiLU",)}
"""Classes outside the model files, to what KTransformers' copies had in their place."""


@cache
def family(model_type: str) -> Family | None:
    """What ktopt knows of a transformers model_type, or None where there is nothing to know."""
    if model_type not in FAMILIES:
        return None
    found: Family = importlib.import_module(f"ktopt.models.{model_type}").FAMILY
    return found


def runs_as(model_type: str) -> str:
    """transformers' model_type that runs a config.json's model_type: itself, but for Kimi-K2 and the like."""
    known = family(model_type)
    return (known.builds_as if known else "") or model_type


def family_of_class(dotted: str) -> Family | None:
    """The family whose transformers code defines a class, such as transformers.models.mixtral.modeling_mixtral.MixtralMLP."""
    parts = dotted.split(".")
    if len(parts) < 4 or parts[:2] != ["transformers", "models"]:
        return None
    return family(parts[2])
