"""transformers' position embeddings as the CPU kernels read them.

Legend: B sequences, S tokens, R rotated numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False, slots=True)
class Rotation:
    """Addresses of cos and sin, float32 (B or 1, S, R), and whether they are the same for all sequences."""

    cos: int
    sin: int
    one: bool
    held: tuple[torch.Tensor, torch.Tensor]

    def fits(self, batch: int, tokens: int, numbers: int) -> bool:
        """Whether they are for so many sequences, tokens and rotated numbers."""
        cos, sin = self.held
        return cos.shape in ((1, tokens, numbers), (batch, tokens, numbers)) and sin.shape == cos.shape


_recent: list[tuple[Any, Rotation | None]] = [(None, None), (None, None)]
"""What was made last, with what it was made of: a model gives all its layers the same one, or two by turns."""


def rotation(embeddings: Any) -> Rotation:
    """Of cos and sin (B or 1, S, R), or of DeepSeek-V2's complex numbers (B or 1, S, R / 2)."""
    for given, made in _recent:
        if given is embeddings and made is not None:
            return made
    if isinstance(embeddings, torch.Tensor):
        halves = torch.view_as_real(embeddings).float()
        cos, sin = (halves[..., i].repeat(1, 1, 2).contiguous() for i in (0, 1))
    else:
        cos, sin = (each.float().contiguous() for each in embeddings)
    found = Rotation(cos.data_ptr(), sin.data_ptr(), cos.shape[0] == 1, (cos, sin))
    _recent[:] = [(embeddings, found), _recent[0]]
    return found
