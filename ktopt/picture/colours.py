"""Colours of devices: distinct for every kind of colour vision (after Okabe and Ito, and Tol), in a light and a dark scheme. Names
are always written beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ktopt.placement import device_kind

HUES = ("#e69f00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a900", "#882255")
MAIN_MEMORY = "#7f7f7f"
LIGHT_GROUND, DARK_GROUND = "#ffffff", "#14181d"
LIGHT_INK, DARK_INK = "#1b2127", "#e6eaee"
LIGHT_SOFT, DARK_SOFT = "#4d5863", "#bcc6cf"


class Colour(NamedTuple):
    """A device's colours: the ground of its modules, and its lines, in both schemes."""

    fill: str
    line: str
    dark_fill: str
    dark_line: str


def colours(devices: Sequence[str]) -> dict[str, Colour]:
    """A colour for each device; after eight accelerators they repeat."""
    accelerators = [device for device in devices if device_kind(device) != "cpu"]
    hues = {device: HUES[number % len(HUES)] for number, device in enumerate(accelerators)}
    return {device: _colour(hues.get(device, MAIN_MEMORY)) for device in devices}


def _colour(hue: str) -> Colour:
    return Colour(
        fill=_mixed(hue, LIGHT_GROUND, 0.22),
        line=_mixed(hue, "#000000", 0.78),
        dark_fill=_mixed(hue, DARK_GROUND, 0.26),
        dark_line=_mixed(hue, "#ffffff", 0.80),
    )


def _mixed(colour: str, ground: str, share: float) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)
