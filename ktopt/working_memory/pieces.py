"""Which modules keep a cache in blocks, and how many tokens of a prompt pass a plan's model at a time."""

from __future__ import annotations

from ktopt.config import LongContextSettings
from ktopt.plan import Plan, Step
from ktopt.registry import find


def keeps_blocks(step: Step) -> bool:
    """Whether a module's operator keeps keys and values in blocks."""
    spec = find(step.operator)
    return spec is not None and spec.blocks


def prompt_piece(plan: Plan) -> int | None:
    """Tokens of a prompt that pass the model at a time: the least chunk_size of its attention and its layers, else that of
    `long_context`, which a plan with a cache of blocks always has; None for the whole prompt."""
    otherwise = plan.long_context.get("chunk_size")
    if otherwise is None and any(keeps_blocks(step) for step in plan.steps if step.role == "attention"):
        otherwise = LongContextSettings().chunk_size
    sizes = [step.kwargs.get("chunk_size") for step in plan.steps if step.role in ("attention", "layer") and _reads_chunk(step)]
    return min((size for size in sizes if isinstance(size, int)), default=otherwise)


def _reads_chunk(step: Step) -> bool:
    spec = find(step.operator)
    field = spec.config.__dataclass_fields__.get("chunk_size") if spec is not None else None
    return field is not None and not field.metadata["ignored"]


def layer_number(path: str) -> int:
    """The first number in a module's path."""
    return next(int(part) for part in path.split(".") if part.isdecimal())


def takes_chunk(plan: Plan) -> bool:
    """Whether anything in a plan reads a chunk_size."""
    return "chunk_size" in plan.long_context or any(
        _reads_chunk(step) for step in plan.steps if step.role in ("attention", "layer")
    )
