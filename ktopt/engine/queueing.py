"""Whose turn it is: waiting requests of several clients, each with a share of the engine's work.

The next is of the client that has been served least, in tokens; a client that comes back after a while has no credit for it.
Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), call it a virtual token counter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

MOST_IDLE = 1024
"""Clients that are remembered though nothing of theirs waits or runs."""


class Item(Protocol):
    @property
    def client(self) -> str: ...


Waits = TypeVar("Waits", bound=Item)


class FairQueue(Generic[Waits]):
    """At most `bound` items, of which one client may have half where others wait too. Not for several threads at once."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._waiting: dict[str, deque[Waits]] = {}
        self._running: dict[str, int] = {}
        self._served: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Waits]:
        for items in self._waiting.values():
            yield from items

    def has_room(self, client: str) -> bool:
        """Whether one more of that client may wait."""
        own, all_items = len(self._waiting.get(client, ())), len(self)
        return all_items < self.bound and (own == all_items or own < max(1, self.bound // 2))

    def put(self, item: Waits) -> None:
        if self._idle(item.client):
            self._welcome(item.client)
        self._waiting.setdefault(item.client, deque()).append(item)

    def head(self) -> Waits | None:
        """Whose turn it is."""
        if not self._waiting:
            return None
        return self._waiting[min(self._waiting, key=lambda client: self._served.get(client, 0.0))][0]

    def start(self, item: Waits) -> None:
        """Its turn has come: it waits no longer, and is running until `ended`."""
        self.remove(item)
        self._running[item.client] = self._running.get(item.client, 0) + 1

    def remove(self, item: Waits) -> None:
        items = self._waiting[item.client]
        items.remove(item)
        if not items:
            del self._waiting[item.client]

    def ended(self, item: Waits) -> None:
        self._running[item.client] -= 1
        if not self._running[item.client]:
            del self._running[item.client]

    def served(self, client: str, tokens: float) -> None:
        """Count what was done for a client."""
        self._served[client] = self._served.get(client, 0.0) + tokens

    def _idle(self, client: str) -> bool:
        return client not in self._waiting and client not in self._running

    def _welcome(self, client: str) -> None:
        """Count a client that begins as served no less than those who have been here."""
        if len(self._served) > MOST_IDLE:
            self._served = {name: tokens for name, tokens in self._served.items() if not self._idle(name)}
        here = [self._served.get(name, 0.0) for name in {*self._waiting, *self._running}]
        if here:
            self._served[client] = max(self._served.get(client, 0.0), min(here))
