"""Experts of a layer that live on another device than the others: which ones, and what both sides take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ktopt.graph import Module
from ktopt.operator import OperatorConfig, Problem
from ktopt.operators.latent_memory import FLOAT_BYTES
from ktopt.operators.model_sizes import CHOSEN, ModelSizes
from ktopt.pattern.numbers import from_ranges
from ktopt.placement import Footprint, Running, Working
from ktopt.popularity import hot_ids

Runs = Callable[[Running], Working]
PIECE_TOKENS = 512
"""Tokens of a prompt that a split layer's sides take at a time."""
Measure = Callable[[Module, OperatorConfig, str], Footprint]


def hot_problems(given: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with a written `hot_experts` by itself."""
    hot = given.get("hot_experts")
    problems = []
    for layer, text in hot.items() if isinstance(hot, Mapping) else [(None, hot or "")]:
        if layer is not None and layer < 0:
            problems.append(Problem("hot_experts", "value", f"`hot_experts`: there is no layer {layer}"))
        try:
            from_ranges(str(text))
        except ValueError as error:
            where = "" if layer is None else f" of layer {layer}"
            problems.append(Problem("hot_experts", "value", f"`hot_experts`{where}: {error}"))
    return problems


def cannot_split(module: Module, config: OperatorConfig) -> str | None:
    """Why a layer's experts can't be split as a config says."""
    hot = hot_ids(config, module.layer)
    if not hot:
        return None
    stacks = [tensor for tensor in module.tensors if len(tensor.shape) == 3]
    if not stacks:
        return f"{module.path} has a module for each expert, which its block calls: `hot_experts` can't split it"
    count = stacks[0].shape[0]
    if hot[-1] >= count:
        return f"{module.path} has experts 0 to {count - 1}, and `hot_experts` names {hot[-1]}"
    if len(hot) == count:
        return f"`hot_experts` names all {count} experts of {module.path}: place them by `generate_device` or `place:`"
    return None


def split_footprint(measure: Measure) -> Measure:
    """A footprint of whole layers, as one of layers whose hot experts are counted on their device, under their op."""

    def measured(module: Module, config: OperatorConfig, dtype: str) -> Footprint:
        hot = hot_ids(config, module.layer)
        count = next((tensor.shape[0] for tensor in module.tensors if len(tensor.shape) == 3), 0)
        if not hot or not count:
            return measure(module, config, dtype)
        here: Any = config
        home = here.generate_device or "cpu"
        device = here.hot_device or home
        there = replace(here, generate_op=here.hot_op, generate_device=device)
        cold = measure(_of(module, count, count - len(hot)), config, dtype)
        moved = measure(_of(module, count, len(hot)), there, dtype).weight_bytes
        elsewhere = {device: moved} if device != home else {}
        return Footprint(cold.weight_bytes + moved, elsewhere=elsewhere, here=Fraction(count - len(hot), count))

    return measured


def split_working(measure: Runs) -> Runs:
    """What whole layers hold while they run, as what split ones do: each side takes a piece's hidden states in float32, a row for
    each choice, and has its results by choice before they are summed. All choices may fall to one side."""

    def measured(running: Running) -> Working:
        kwargs = running.step.kwargs
        if not kwargs.get("hot_experts"):
            return measure(running)
        sizes = ModelSizes.of(running.model)
        tokens = min(running.rows, PIECE_TOKENS)
        all_rows, rows = (count * sizes.hidden * FLOAT_BYTES for count in (running.rows, tokens))
        choices = rows * sizes.chosen
        one = {**running.model, **{name: 1 for name in CHOSEN if name in running.model}}
        each = replace(running, model=one, item=FLOAT_BYTES, sequences=tokens * sizes.chosen, tokens=1)
        hot_step = running.step._replace(stored=(), kwargs={**kwargs, "generate_op": kwargs.get("hot_op")})
        cold, hot = measure(each), measure(replace(each, step=hot_step))
        there = 2 * rows + 2 * choices + hot.transient_bytes
        here = 2 * all_rows + 2 * rows + choices + cold.transient_bytes
        device = str(kwargs.get("hot_device") or running.step.generate_device)
        return Working(0, here, cold.kept_bytes, {device: there})

    return measured


def _of(module: Module, count: int, kept: int) -> Module:
    """A module of so many of the experts."""
    tensors = (
        replace(tensor, shape=(kept, *tensor.shape[1:])) if tensor.shape[:1] == (count,) else tensor for tensor in module.tensors
    )
    return replace(module, tensors=tuple(tensors))
