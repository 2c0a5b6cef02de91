"""How fast a machine's devices are taken to be, where a hardware file, a preset or the card's name doesn't say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ktopt.placement import Hardware, Speed, device_kind
from ktopt.plan import Step

ASSUMED = {
    "cpu": Speed(bandwidth_gbs=50.0, op_us=2.0),
    "": Speed(bandwidth_gbs=500.0, link_gbs=15.75, link_us=10.0, op_us=5.0),
}
"""By kind of device, "" for accelerators: two channels of DDR4-3200, a small card on PCI Express 3, a kernel's launch."""


def settled_speeds(hardware: Hardware) -> tuple[dict[str, Speed], list[str]]:
    """Each device's speed, main memory's as "cpu", with nothing left unknown; and in words what had to be assumed that matters
    most."""
    speeds: dict[str, Speed] = {}
    assumed: list[str] = []
    for name, speed in (("cpu", hardware.speed), *((d.name, d.speed) for d in hardware.devices)):
        usual = ASSUMED.get(device_kind(name), ASSUMED[""])
        if not speed.bandwidth_gbs:
            where = "main memory" if name == "cpu" else name
            assumed.append(f"{where} reads {usual.bandwidth_gbs:g} GB/s")
        speeds[name] = replace(
            speed,
            bandwidth_gbs=speed.bandwidth_gbs or usual.bandwidth_gbs,
            link_gbs=speed.link_gbs or usual.link_gbs,
            link_us=speed.link_us or usual.link_us,
            op_us=speed.op_us or usual.op_us,
        )
    return speeds, assumed


def hop_us(speed: Speed, nbytes: int) -> float:
    """Half of a hop: from main memory to a device, or back. Main memory itself takes no time."""
    return speed.link_us + nbytes / speed.link_gbs / 1e3 if speed.link_gbs else 0.0


def read_us(speed: Speed, nbytes: float, step: Step | None = None) -> float:
    """The time in which a decoded token reads so many bytes, of the weights of a plan's row where there is one."""
    rate = _rate(speed.matvec_gbs, step) if step is not None and speed.matvec_gbs else None
    return nbytes / (rate or speed.bandwidth_gbs) / 1e3


def _rate(rates: Mapping[str, float], step: Step) -> float | None:
    """GB/s of products with the row's weights: of the slowest of the types that they are stored in, else of the op that packs them,
    else of their dtype."""
    if step.stored:
        known = [rates[kind] for kind in step.stored if kind in rates]
        return min(known) if known else None
    asked = str(step.kwargs.get("generate_op", ""))
    running = step.runs.get(asked, (asked, ""))[0]
    return rates.get(running) or rates.get(step.dtype)
