"""PlacedRotary: a model's rotary embedding with its frequencies on every device that needs them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ktopt.diagnostics import KtoptError
from ktopt.operators.modules.base import BuildContext


class PlacedRotary(nn.Module):
    """One copy of transformers' rotary embedding for each device; a call uses the copy on its input's device.

    transformers computes cos and sin once for a whole model; upstream did so once a layer, on the layer's device. A call takes what
    the original's takes, x of any shape (its dtype and device matter) and position_ids (batch, tokens), and returns what it
    returns: cos and sin (batch, tokens, rotated head_dim) in x's dtype, on x's device.
    """

    def __init__(self, copies: dict[str, nn.Module], home: str) -> None:
        super().__init__()
        self.home = home
        self.copies = nn.ModuleDict({_key(device): rotary for device, rotary in copies.items()})

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        if not hasattr(original, "config"):
            raise KtoptError(
                f"{context.step.path}: {type(original).__name__} carries no config to make its frequencies from, so it is not one of "
                "transformers' rotary embeddings; use `default` for it"
            )
        devices = [context.step.generate_device, *context.step.replicas]
        copies = {device: original if i == 0 else copy.deepcopy(original) for i, device in enumerate(devices)}
        return cls(copies, context.step.generate_device)

    def load_tensors(self, context: BuildContext) -> None:
        """Compute the frequencies, which no weight file holds, and place a copy on each device."""
        rotary = materialized(self.copies[_key(self.home)])
        for device in (context.step.generate_device, *context.step.replicas):
            self.copies[_key(device)] = copy.deepcopy(rotary).to(device)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key = _key(str(x.device))
        return self.copies[key if key in self.copies else _key(self.home)](x, *args, **kwargs)


def materialized(rotary: nn.Module) -> nn.Module:
    """A rotary embedding whose buffers hold values: itself, or where they are on meta one made anew from its config on the CPU."""
    if not any(buffer.is_meta for buffer in rotary.buffers()):
        return rotary
    with torch.device("cpu"):
        made: nn.Module = type(rotary)(rotary.config).train(rotary.training)
    return made


def _key(device: str) -> str:
    """A device as a ModuleDict's key: "cuda:1" is "cuda_1"; without a number, number 0."""
    kind, _, number = device.partition(":")
    return kind if kind in ("cpu", "mps", "meta") else f"{kind}_{number or 0}"
