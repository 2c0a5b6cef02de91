"""A context in blocks, of mode long_context, as an engine runs on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ktopt.engine.contexts import OnRead
from ktopt.long_context.session import LongContextSession


class SessionContext:
    """Runs on a session, which stays its owner's: closing this doesn't close it."""

    def __init__(self, session: LongContextSession) -> None:
        self._session = session
        self.most_tokens: int | None = session.capacity
        self.most_prompt_tokens: int | None = session.settings.max_seq_len

    def read(self, ids: Sequence[int], on_read: OnRead) -> torch.Tensor:
        told = False

        def tell(done: int, total: int) -> None:
            nonlocal told
            told = True
            on_read(len(ids) - total + done, len(ids) - total)

        before, self._session.progress = self._session.progress, tell
        try:
            logits_1V = self._session.go_to(torch.tensor([list(ids)]))
        finally:
            self._session.progress = before
        if not told:
            on_read(len(ids), len(ids))
        return logits_1V

    def step(self, token: int) -> torch.Tensor:
        return self._session.read(torch.tensor([[token]]))

    def forget(self) -> None:
        self._session.reset()

    def memory_bytes(self) -> Mapping[str, int]:
        held = self._session.kvc2.statistics
        return {} if held is None else {"device": held.device_bytes, "memory": held.host_bytes, "disk": held.disk_bytes}

    def close(self) -> None:
        pass
