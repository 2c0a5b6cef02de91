"""Loading a model and reading long contexts, by KTransformers' names: `from ktopt.util.utils import load_model, ...`."""

from __future__ import annotations

from ktopt.api import load_model
from ktopt.long_context.current import chunk_prefill, decode_wrapper

__all__ = ["chunk_prefill", "decode_wrapper", "load_model"]
