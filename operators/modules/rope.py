"""PlacedRotary: a model's rotary embedding with its frequencies on every device that needs them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext


class PlacedRotary(nn.Module):
    """One copy of transformers' rotary embedding for each device; a call uses the copy on its input's device.

    transformers computes cos and sin once for a whole model; upstream did so once a layer, on the layer's device. A call takes what
    the original's takes, x of any shape (its dtype and device matter) and position_ids (batch, tokens), and returns what it
    returns: cos and sin (batch, tokens, rotated head_dim) in x's dtype, on x's device.
    """

    def __init__(self, copies: dict[str, nn.Module]) -> None:
        super().__init__()
        self.place_of = {torch.device(device): place for place, device in enumerate(copies)}
        self.copies = nn.ModuleList(copies.values())

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        if not hasattr(original, "config"):
            raise KtoptError(
                f"{context.step.path}: {type(original).__name__} carries no config to make its frequencies from, so it is none of "
                "transformers' rotary embeddings; use `default` for it"
            )
        devices = (context.step.generate_device, *context.step.replicas)
        return cls({device: original if place == 0 else copy.deepcopy(original) for place, device in enumerate(devices)})

    def load_tensors(self, context: BuildContext) -> None:
        """Compute the frequencies, which no weight file holds, and place a copy on each device."""
        rotary = materialized(self.copies[0])
        for device, place in self.place_of.items():
            self.copies[place] = copied_to(rotary, device)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.copies[self.place_of.get(x.device, 0)](x, *args, **kwargs)


def copied_to(rotary: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a rotary embedding, its buffers on `device`; the config is shared."""
    moved: dict[int, Any] = {id(buffer): buffer.to(device, copy=True) for buffer in rotary.buffers()}
    return copy.deepcopy(rotary, {**moved, id(rotary.config): rotary.config})


def materialized(rotary: nn.Module) -> nn.Module:
    """A rotary embedding whose buffers hold values: itself, or where they are on meta one made anew from its config on the CPU."""
    if not any(buffer.is_meta for buffer in rotary.buffers()):
        return rotary
    with torch.device("cpu"):
        made: nn.Module = type(rotary)(rotary.config).train(rotary.training)
    return made
