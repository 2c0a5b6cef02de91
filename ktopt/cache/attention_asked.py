"""What a module of transformers asks of an attention function, for those of ktopt: they compute causal attention, with a scale and
a window, and refuse what is more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ktopt.diagnostics import KtoptError

UNKNOWN = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
"""Arguments of other attention functions that change what is computed."""


def scale_and_window(
    name: str,
    module: torch.nn.Module,
    key_dim: int,
    scaling: float | None,
    sliding_window: int | None,
    is_causal: bool | None,
    others: Mapping[str, Any],
) -> tuple[float, int]:
    """The scale of scores, and the tokens that a sliding window sees, 0 without one. `name` is the attention function's, `others`
    its further arguments. KtoptError where more is asked for."""
    if asked := next((each for each in UNKNOWN if others.get(each) is not None), None):
        raise KtoptError(f"{type(module).__name__} asks attention for {asked}, which {name} doesn't compute")
    if not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise KtoptError(f"{type(module).__name__} sees later tokens, which {name} doesn't compute")
    scale = key_dim**-0.5 if scaling is None else scaling
    return scale, sliding_window or getattr(module, "sliding_window", None) or 0
