"""`default`: the module stays as it is and is only placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktopt.operator import PlacedConfig, Problem, operator
from ktopt.placement import Running, Working


def own_working(running: Running) -> Working:
    """What the module takes as transformers has it."""
    from ktopt.operators import own_memory  # for plans that are asked what they take

    return own_memory.own_working(running)


@operator(
    "default",
    summary="keeps the module as transformers made it and places it on a device",
    upstream="left the module alone and recorded the device that its weights were loaded to",
    working=own_working,
)
@dataclass(frozen=True, kw_only=True)
class DefaultConfig(PlacedConfig):
    """kwargs of `default`."""

    @classmethod
    def cross_check(cls, given: Mapping[str, Any]) -> list[Problem]:
        if "prefill_device" in given and "generate_device" not in given:
            message = "default needs `generate_device`, where the weights live; `prefill_device` alone does not place the module"
            return [Problem("generate_device", "missing", message)]
        return []
