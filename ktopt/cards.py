"""Common accelerators as their makers publish them: memory, its bandwidth, compute capability, and the link to main memory."""

from __future__ import annotations

import re
from typing import NamedTuple


class Card(NamedTuple):
    """One accelerator.

    memory_gib      GiB, as makers mean their GB
    bandwidth_gbs   GB/s of its memory
    sm              CUDA compute capability times ten; None where it has none
    link_gbs        GB/s of its PCI Express slot in one direction, before overheads
    sold_as         how the driver names it, in lower case: words that its name has in this order
    """

    name: str
    memory_gib: int
    bandwidth_gbs: float
    sm: int | None
    link_gbs: float
    sold_as: str


PCIE3, PCIE4, PCIE5 = 15.75, 31.5, 63.0

CARDS = tuple(
    Card(*row)
    for row in (
        ("T4", 16, 320, 75, PCIE3, "t4"),
        ("V100-16GB", 16, 900, 70, PCIE3, "v100 16gb"),
        ("V100-32GB", 32, 900, 70, PCIE3, "v100 32gb"),
        ("3060-12GB", 12, 360, 86, PCIE4, "rtx 3060"),
        ("3080-10GB", 10, 760, 86, PCIE4, "rtx 3080"),
        ("3090", 24, 936, 86, PCIE4, "rtx 3090"),
        ("3090Ti", 24, 1008, 86, PCIE4, "rtx 3090 ti"),
        ("4060Ti-16GB", 16, 288, 89, PCIE4 / 2, "rtx 4060 ti"),
        ("4070Ti", 12, 504, 89, PCIE4, "rtx 4070 ti"),
        ("4070TiSuper", 16, 672, 89, PCIE4, "rtx 4070 ti super"),
        ("4080", 16, 717, 89, PCIE4, "rtx 4080"),
        ("4090", 24, 1008, 89, PCIE4, "rtx 4090"),
        ("5080", 16, 960, 120, PCIE5, "rtx 5080"),
        ("5090", 32, 1792, 120, PCIE5, "rtx 5090"),
        ("A10", 24, 600, 86, PCIE4, "a10"),
        ("A6000", 48, 768, 86, PCIE4, "rtx a6000"),
        ("RTX6000Ada", 48, 960, 89, PCIE4, "rtx 6000 ada"),
        ("L4", 24, 300, 89, PCIE4, "l4"),
        ("L40S", 48, 864, 89, PCIE4, "l40s"),
        ("A100-40GB", 40, 1555, 80, PCIE4, "a100 40gb"),
        ("A100-80GB", 80, 2039, 80, PCIE4, "a100 80gb"),
        ("H100", 80, 3350, 90, PCIE5, "h100"),
        ("H100-PCIe", 80, 2039, 90, PCIE5, "h100 pcie"),
        ("H200", 141, 4800, 90, PCIE5, "h200"),
        ("MI210", 64, 1638, None, PCIE4, "mi210"),
        ("MI300X", 192, 5300, None, PCIE5, "mi300x"),
    )
)

USUAL = {24: "4090", 40: "A100-40GB", 48: "L40S", 80: "H100", 141: "H200"}
"""The card that a preset of a size alone means."""

_BY_NAME = {card.name.lower(): card for card in CARDS}


def card_named(text: str) -> Card | None:
    """The card of a preset's name: "3090", "a100-80", "H100"."""
    name = text.lower()
    return _BY_NAME.get(name) or _BY_NAME.get(f"{name}gb")


def card_sold_as(model: str, memory_bytes: int = 0) -> Card | None:
    """The card of a driver's name, such as "NVIDIA GeForce RTX 4090": of those whose words it has, the one with most. Where two
    differ in memory alone, the one whose size is nearer. None for one that isn't here, such as a card for laptops."""
    words = re.findall(r"[a-z]+[0-9]*[a-z]*|[0-9]+[a-z]*", model.lower())
    if (named := card_named(model)) is not None:
        return named
    variant = {"ti", "super", "laptop", "max"} & set(words)
    found = [card for card in CARDS if _without_size(card) <= set(words) and variant <= _without_size(card)]
    near = [card for card in found if len(_without_size(card)) == max(len(_without_size(each)) for each in found)]
    return min(near, key=lambda card: abs((card.memory_gib << 30) - memory_bytes), default=None)


def _without_size(card: Card) -> set[str]:
    return {word for word in card.sold_as.split() if not re.fullmatch(r"\d+gb", word)}
