"""Devices and machines: device names, what a machine has, and the bytes that a module takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktopt.operator import OperatorConfig
    from ktopt.plan import Step

DEVICE_KINDS = ("cpu", "cuda", "npu", "xpu", "mps")
DTYPES = ("float32", "bfloat16", "float16")
"""What floating-point weights may be held in."""
_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|mps)(?::([0-9]+))?")
HIGHEST_NUMBER = 127  # torch counts devices in a signed byte


def canonical_device(text: str) -> str:
    """The one spelling of a device: "cuda" is "cuda:0"; "cpu" and "mps" carry no number. ValueError for what is no device."""
    found = _DEVICE.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not a device; devices are {', '.join(DEVICE_KINDS)}, or one with a number such as cuda:1")
    kind, number = found.groups()
    if kind in ("cpu", "mps"):
        if number not in (None, "0"):
            raise ValueError(f"{text!r} is not a device: there is one {kind}")
        return kind
    if number and (len(number) > 3 or int(number) > HIGHEST_NUMBER):
        raise ValueError(f"{text!r:.40} is not a device: numbers go up to {HIGHEST_NUMBER}")
    return f"{kind}:{int(number or 0)}"


def device_kind(device: str) -> str:
    return device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a module takes where it is placed.

    weight_bytes     its weights at rest
    transient_bytes  the most that it holds while it runs, beyond inputs and outputs
    elsewhere        of weight_bytes, what lives on other devices than the generate device, by device
    here             the part of its matrices that the generate op holds; the rest is another op's
    """

    weight_bytes: int = 0
    transient_bytes: int = 0
    elsewhere: Mapping[str, int] = field(default_factory=dict, hash=False)
    here: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class Running:
    """A module that runs on tokens, as its operator is asked what it holds meanwhile.

    model      the config of the model, or of its text
    config     the kwargs of the module's operator
    step       its row of the plan
    below      the rows of the modules below it, in order
    item       bytes of a number of the hidden states
    sequences  how many are computed at once
    tokens     new ones of each
    context    those of each when the new ones are computed
    """

    model: Mapping[str, Any]
    config: OperatorConfig
    step: Step
    below: Sequence[Step]
    item: int
    sequences: int
    tokens: int
    context: int

    @property
    def rows(self) -> int:
        """Hidden states that pass."""
        return self.sequences * self.tokens

    @property
    def kind(self) -> str:
        """The kind of device."""
        return device_kind(self.step.generate_device)

    @property
    def masked(self) -> bool:
        """Whether transformers makes a mask: not for one new token of each sequence, nor for sequences that begin."""
        return 1 < self.tokens < self.context


@dataclass(frozen=True, slots=True)
class Working:
    """Bytes that a module holds beside its weights.

    cache_bytes      for the tokens of the context, as long as they are remembered
    transient_bytes  the most at once while it runs, beyond its input, the cache, and what it keeps
    kept_bytes       memory that its kernels use again from call to call, and share with other modules'
    elsewhere        transient_bytes on another device that it computes on, by device (hot experts)
    """

    cache_bytes: int = 0
    transient_bytes: int = 0
    kept_bytes: int = 0
    elsewhere: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a device is; 0, or no entry, where that isn't known.

    bandwidth_gbs   GB/s at which it reads its memory
    link_gbs        GB/s between its memory and main memory, one way
    link_us         microseconds before a transfer's first byte
    op_us           microseconds that an operation takes beside its work
    matvec_gbs      GB/s of weights in products with one token, by storage type or dtype
    matmul_gflops   GFLOP/s in products with many tokens, by storage type or dtype
    """

    bandwidth_gbs: float = 0.0
    link_gbs: float = 0.0
    link_us: float = 0.0
    op_us: float = 0.0
    matvec_gbs: Mapping[str, float] = field(default_factory=dict, hash=False)
    matmul_gflops: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a machine. `sm` is a CUDA compute capability times ten (89 for 8.9)."""

    name: str
    memory_bytes: int
    model: str = ""
    sm: int | None = None
    speed: Speed = Speed()

    @property
    def kind(self) -> str:
        return device_kind(self.name)


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine, detected, described in a file, or a preset: its accelerators, RAM, cores and CPU features ("avx512_vnni").
    `speed` is that of the CPU and main memory."""

    name: str
    devices: tuple[Device, ...] = ()
    ram_bytes: int = 0
    cores: int = 0
    cpu_features: frozenset[str] = field(default=frozenset())
    speed: Speed = Speed()

    def has(self, device: str) -> bool:
        return device == "cpu" or any(d.name == device for d in self.devices)

    def device(self, name: str) -> Device | None:
        return next((d for d in self.devices if d.name == name), None)
