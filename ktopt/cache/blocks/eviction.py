"""Which parts of a cache are the least likely to be selected next: recency weighted by how often they have been.

Each selection of a part counts 1, and half of that after HALF_LIFE more steps of its layer, so that a part of every step is warmer
than one that was selected once a moment ago. Instead of cooling all parts at each step, what a selection adds grows (as the
activity of variables in SAT solvers does), and everything is scaled down when it has grown too far.

Legend: P parts, of all layers, rows and blocks; S those of a question.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HALF_LIFE = 16.0
"""Steps of a layer after which a selection counts half."""
GROWTH = 2.0 ** (1.0 / HALF_LIFE)
MOST = 1e30
"""Beyond it a layer's warmth is scaled down: float32 ends at 3e38."""
ORDER_WEIGHT = 0.5
"""What a selection must have counted to outweigh that a part's layer comes a whole round later than another's."""


class Warmth:
    """How warm each part is: float32 (P,), the parts of a layer side by side."""

    def __init__(self, layers: int, parts_of_layer: int) -> None:
        self._layers = layers
        self._parts_of_layer = parts_of_layer
        self._warmth_P = np.zeros(layers * parts_of_layer, dtype=np.float32)
        self._gain = np.ones(layers, dtype=np.float32)  # what a selection of a layer adds by now
        self._current = 0  # the layer that was marked last

    @property
    def nbytes(self) -> int:
        return self._warmth_P.nbytes + self._gain.nbytes

    def mark(self, layer: int, parts_S: NDArray[np.int64]) -> None:
        """A step of the layer has selected these parts of it. What stands twice counts once."""
        gain = self._gain[layer] * GROWTH
        self._gain[layer] = gain
        self._warmth_P[parts_S] += gain
        self._current = layer
        if gain > MOST:
            self._scale_down(layer)

    def begin(self, layer: int, parts_S: NDArray[np.int64]) -> None:
        """New parts of a layer begin as if they had been selected once just now."""
        self._warmth_P[parts_S] = self._gain[layer]

    def expect(self, layer: int, parts_S: NDArray[np.int64]) -> None:
        """These parts are about to be selected: they are no colder than what has been selected once just now."""
        self._warmth_P[parts_S] = np.maximum(self._warmth_P[parts_S], self._gain[layer])

    def coldest(self, parts_S: NDArray[np.int64], count: int) -> NDArray[np.intp]:
        """Positions of the `count` coldest in `parts_S`. Among parts alike, those go first whose layer comes last: a round over the
        layers that doesn't fit into memory would else take away just what it needs next."""
        if count >= len(parts_S):
            return np.arange(len(parts_S))
        layers_S = parts_S // self._parts_of_layer
        until_S = (layers_S - (self._current + 1)) % self._layers  # layers before this one has its turn again
        warmth_S = self._warmth_P[parts_S] / self._gain[layers_S] - until_S * (ORDER_WEIGHT / self._layers)
        return np.argpartition(warmth_S, count - 1)[:count]

    def _scale_down(self, layer: int) -> None:
        first = layer * self._parts_of_layer
        self._warmth_P[first : first + self._parts_of_layer] /= self._gain[layer]
        self._gain[layer] = 1.0
