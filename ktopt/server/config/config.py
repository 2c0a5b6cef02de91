"""`Config`, by KTransformers' name: `from ktopt.server.config.config import Config`."""

from __future__ import annotations

from ktopt.long_context.config import Config

__all__ = ["Config"]
