"""Whether it pays to read ahead: how many of the parts that were brought in before anybody asked for them were then asked for.

Parts that weren't have taken the place of others and the disk's time. Where most are of no use, nothing is read ahead but for a try
now and then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEAST_USED = 0.5
"""Of what is read ahead, for it to go on."""
NEWEST = 0.2
"""What the last step counts in that share."""
TRY_EVERY = 32


class Foresight:
    """Of one store, whose parts are numbered."""

    def __init__(self) -> None:
        self.used_share = 1.0
        self._ahead: dict[int, NDArray[np.int64]] = {}  # by layer: parts that are on their way or there, and not yet asked for
        self._refused = 0

    def pays(self) -> bool:
        """Whether to read ahead now."""
        if self.used_share >= LEAST_USED:
            return True
        self._refused += 1
        return self._refused % TRY_EVERY == 0

    def brings(self, layer: int, parts_S: NDArray[np.int64]) -> None:
        """These parts of a layer are read ahead."""
        if len(parts_S):
            self._ahead[layer] = parts_S

    def asked(self, layer: int, parts_RK: NDArray[np.int64]) -> None:
        """These parts of a layer are asked for."""
        ahead_S = self._ahead.pop(layer, None)
        if ahead_S is not None:
            used = float(np.isin(ahead_S, parts_RK).mean())
            self.used_share += NEWEST * (used - self.used_share)

    def forget(self) -> None:
        """All that is on its way."""
        self._ahead.clear()
