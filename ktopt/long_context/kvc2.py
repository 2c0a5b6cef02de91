"""kvc2, KTransformers' name for what keeps a cache's blocks: where a session's lie, and of which prompts there are some on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ktopt.cache.blocks.folders import folder_at
from ktopt.cache.blocks.statistics import CacheStatistics
from ktopt.config import CacheSettings

if TYPE_CHECKING:
    from ktopt.long_context.session import LongContextSession

PREFIXES = "prefixes"
"""The folder under disk_path with blocks that outlive their session."""


class KVC2:
    """Of one session, which holds it as `session.kvc2`."""

    def __init__(self, session: LongContextSession, settings: CacheSettings) -> None:
        self._session, self.settings = session, settings

    @property
    def statistics(self) -> CacheStatistics | None:
        """Hits, bytes and waits by tier; None before the first token."""
        blocks = self._session.blocks
        found: CacheStatistics | None = None if blocks is None else blocks.statistics
        return found

    def table(self) -> list[tuple[str, ...]]:
        """The tiers as rows of text, the headings first: what each holds, may hold, and what was found there. [] before the first
        token."""
        return [] if self.statistics is None else [tuple(row) for row in self.statistics.table()]

    def movements(self) -> list[tuple[str, ...]]:
        """What was moved between tiers, and what was waited for, likewise."""
        return [] if self.statistics is None else [tuple(row) for row in self.statistics.movements()]

    @property
    def folder(self) -> Path | None:
        """Where blocks of prompts outlive the session; None without prefix_reuse."""
        settings = self.settings
        return folder_at(settings.disk_path) / PREFIXES if settings.prefix_reuse and settings.disk_path else None

    def match(self, prompt: Any) -> int:
        """How many tokens of a prompt (N or (1, N)) needn't be read, since an earlier session's blocks of them are there."""
        prefixes = self._session.prefixes
        return 0 if prefixes is None else int(prefixes.match(torch.as_tensor(prompt).reshape(-1).tolist()))
