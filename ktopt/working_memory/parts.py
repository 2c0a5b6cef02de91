"""The modules of a plan that run by themselves, each with its operator's word on what it holds, and what stands around it.

A module below one whose operator computes all of it (a fused layer, a list of experts) doesn't run by itself. An operator that says
nothing of what it holds leaves its module's forward to transformers, of which `default` says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktopt.graph import ITEM_BYTES
from ktopt.operator import OperatorConfig, OperatorSpec, build_config
from ktopt.placement import Running, Working
from ktopt.plan import Plan, Step
from ktopt.registry import find
from ktopt.working_memory.pieces import keeps_blocks

AROUND = {"embedding": 0, "layer": 2, "attention": 3, "mlp": 4, "experts": 4, "linear": 1}
"""Hidden states that the model and the layer hold while a module runs: those that the first layer began with, the layer's input,
and in transformers' layers the sum so far and what of it is normed."""
CLOSED = ("layer", "attention", "mlp", "experts")
"""Roles of modules that those below them are part of; of layers only those that an operator computes as one."""


@dataclass(frozen=True)
class RunningModule:
    """A module that runs. `around` is how many hidden states others hold meanwhile."""

    step: Step
    below: Sequence[Step]
    spec: OperatorSpec
    config: OperatorConfig
    around: int

    def working(self, model: Mapping[str, Any], batch: int, tokens: int, context: int, chunk_size: int | None = None) -> Working:
        """What it holds while the last `tokens` of a context of each of `batch` sequences pass."""
        config = self.config
        if chunk_size and hasattr(config, "chunk_size"):
            config = replace(config, chunk_size=chunk_size)  # type: ignore[call-arg]
        assert self.spec.working is not None
        return self.spec.working(Running(model, config, self.step, self.below, ITEM_BYTES[self.step.dtype], batch, tokens, context))


def text_config(plan: Plan) -> Mapping[str, Any]:
    """The config of the model, or of its text."""
    config: Mapping[str, Any] = plan.model.config
    return config.get("text_config") or config


def parts_of(plan: Plan) -> Iterator[RunningModule]:
    """Every module that runs by itself, in the model's order."""
    at = 0
    while at < len(plan.steps):
        step = plan.steps[at]
        part = _part(step, ())
        at += 1
        if part is not None and step.role in CLOSED:
            part = replace(part, below=plan.below(step.path))
            at += len(part.below)
        if part is not None:
            yield part


def part_of(plan: Plan, step: Step) -> RunningModule | None:
    """A module as if it ran by itself, or the layer that computes it."""
    layer = plan.by_path.get(step.path.rpartition(".")[0])
    if layer is not None and (found := _part(layer, ())) is not None and found.step.role == "layer":
        return replace(found, below=plan.below(layer.path))
    return _part(step, plan.below(step.path))


def _part(step: Step, below: Sequence[Step]) -> RunningModule | None:
    around = AROUND.get(step.role)
    if around is None or (step.role in ("linear", "embedding") and any(name.isdecimal() for name in step.path.split("."))):
        return None
    spec, default = find(step.operator), find("default")
    if spec is None or spec.working is None:
        spec = None if step.role == "layer" else default
    if spec is None or (step.role == "layer" and spec is default):
        return None  # its own children run
    config, _ = build_config(spec, step.kwargs) if spec is not default else (None, [])
    return RunningModule(step, below, spec, config or spec.config(), around + ("shared_expert" in step.path))


def blocked(part: RunningModule) -> list[Step]:
    """The attention in a part whose cache is in blocks."""
    return [step for step in (part.step, *part.below) if step.role == "attention" and keeps_blocks(step)]
