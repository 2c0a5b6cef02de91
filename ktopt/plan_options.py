"""What the command line or the API adds to a rule file when a plan is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ktopt.config import Config
from ktopt.diagnostics import UsageError
from ktopt.placement import DTYPES, Hardware, canonical_device, device_kind
from ktopt.popularity import Popularity
from ktopt.ruleset import RuleSet

LONG_CONTEXT = "long_context"
MODES = ("normal", LONG_CONTEXT)
"""How a model is to run: as the rules have it, or with attention that keeps its cache in blocks."""


def check_mode(mode: str) -> None:
    """UsageError for what is no mode."""
    if mode not in MODES:
        raise UsageError(f"mode is one of {', '.join(MODES)}, not {mode!r}")


@dataclass(frozen=True)
class PlanOptions:
    """What the command line or the API adds to a rule file.

    device   where modules go that nothing places; None leaves it to the rule file's form
    dtype    what floating-point weights are held in; None leaves it to the rule file, then to the model's config
    hardware the machine planned for; None when unknown
    chunk_size  tokens of a prompt that attention takes at a time, instead of what rules say; None leaves it to them
    config   a long-context config, whose sections join the rule file's
    mode     one of MODES
    context  tokens that there is to be room for on `hardware`; None asks for none, and leaves it to `place: auto` for how many
    storage  one of MIXES in weights/usual.py: the kind of file that weights are taken to lie in where none are given
    popularity  how often experts are chosen, for `place: auto`
    room     tokens that `place: auto` makes room for where `context` is None: what a run asks for, where that is known
    batch    sequences of so many tokens at once
    remap    device or device kind -> device that takes its place, such as {"cuda": "cpu"}
    """

    device: str | None = None
    dtype: str | None = None
    hardware: Hardware | None = None
    chunk_size: int | None = None
    config: Config | None = None
    mode: str = "normal"
    context: int | None = None
    storage: str | None = None
    popularity: Popularity | None = None
    room: int | None = None
    batch: int = 1
    remap: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 1:
            raise UsageError(f"chunk_size: a number of tokens from 1 on, not {self.chunk_size}")
        if self.context is not None and self.context < 1:
            raise UsageError(f"context: a number of tokens from 1 on, not {self.context}")
        if self.room is not None and self.room < 1:
            raise UsageError(f"room: a number of tokens from 1 on, not {self.room}")
        if self.batch < 1:
            raise UsageError(f"batch: a number of sequences from 1 on, not {self.batch}")
        check_mode(self.mode)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        for text in (self.device, *self.remap, *self.remap.values()):
            if text is not None:
                try:
                    canonical_device(text)
                except ValueError as error:
                    raise UsageError(str(error)) from None

    def default_device(self, ruleset: RuleSet) -> str:
        """Where modules go that nothing places."""
        return canonical_device(self.device or ruleset.default_device)

    def place(self, device: str) -> str:
        """A device after remapping: an exact name wins over its kind."""
        target = self.remap.get(device) or self.remap.get(device_kind(device))
        return canonical_device(target) if target else device
