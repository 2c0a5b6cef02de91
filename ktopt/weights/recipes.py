"""How a model's parameter is put together from what a file stores: a recipe, and the one function that carries it out.

Most parameters are one stored tensor. Others are joined (the gate and up projections of all experts), have their rows in
another order (rotary heads in GGUF's llama models), are transposed per head (MLA's split kv_b), or shifted by one (Gemma's
norms). A recipe says so as data: names.py and safetensors.py write recipes, `assemble` reads each part straight into its place
in the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ktopt.weights.source import MissingTensor, WeightError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Bytes = np.ndarray[Any, Any]
    Stored = tuple[str, tuple[int, ...], Bytes]

Rows = Callable[[], "np.ndarray[Any, Any]"]


class RecipeBook:
    """The recipes of a file's parameters, each written once, when it is first asked for.

    write     gives a parameter's recipe, None where the file doesn't have it
    missing   says of a parameter that the file doesn't have it
    """

    def __init__(self, write: Callable[[str], Recipe | None], missing: Callable[[str], str]) -> None:
        self._write, self._missing = write, missing
        self._known: dict[str, Recipe | None] = {}

    def get(self, name: str) -> Recipe | None:
        if name not in self._known:
            self._known[name] = self._write(name)
        return self._known[name]

    def needed(self, name: str) -> Recipe:
        """The parameter's recipe; MissingTensor where there is none."""
        recipe = self.get(name)
        if recipe is None:
            raise MissingTensor(self._missing(name))
        return recipe


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor and its place.

    at          index into the parameter, viewed in the recipe's `view` shape
    rows        gives the stored rows' indices in the model's order, where they differ
    transposed  whether the last two dimensions are stored the other way round
    scale       a stored tensor with one factor for every block of the matrix (FP8 checkpoints), "" for none
    """

    stored: str
    at: tuple[int | slice, ...] = ()
    rows: Rows | None = field(default=None, compare=False)
    transposed: bool = False
    scale: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A parameter of `shape` from `parts`. `view` is the shape in which parts are placed; `after` is applied to the whole at the
    end: "minus_one", or "log_of_negative" (Mamba's A, which GGUF stores as -exp(A))."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    parts: tuple[Part, ...]
    after: str = ""

    @property
    def as_stored(self) -> bool:
        """Whether the parts, rows reordered, are the parameter's own rows: no transposition, no arithmetic."""
        return not self.after and not any(part.transposed or part.scale for part in self.parts)

    @property
    def alternates(self) -> bool:
        """Whether a matrix has rows of each part in turn, group by group, rather than one part below the other."""
        return len(self.parts) > 1 and len(self.shape) == 2 and len(self.view) == 3


def single(stored: str, shape: tuple[int, ...], **rest: Any) -> Recipe:
    """The parameter is one stored tensor."""
    return Recipe(shape, rest.pop("view", shape), (Part(stored, rows=rest.pop("rows", None)),), **rest)


def gathered(part: Part, raw: Bytes, kind: str, shape: tuple[int, ...]) -> Bytes:
    """The stored bytes (..., bytes of a row) with rows in the model's order; the mapping itself where that is the stored order."""
    if part.rows is None:
        return raw
    order = part.rows()
    if len(shape) == 1:
        return raw.reshape(shape[0], -1)[order].reshape(-1)
    return raw.reshape(-1, raw.shape[-1])[order].reshape(raw.shape)


def alternated(recipe: Recipe, parts: list[Stored]) -> list[Stored]:
    """The stored parts of a matrix that `alternates`, as (type, shape, bytes), cut up in the order of its rows: parts of one type
    joined to one, others as many as there are turns."""
    import numpy as np

    groups = recipe.view[0]
    cut = [(kind, (shape[0] // groups, shape[1]), raw.reshape(groups, shape[0] // groups, -1)) for kind, shape, raw in parts]
    kinds = {kind for kind, _, _ in cut}
    if len(kinds) == 1:
        whole = np.concatenate([raw for _, _, raw in cut], axis=1)
        return [(kinds.pop(), recipe.shape, whole.reshape(recipe.shape[0], -1))]
    return [(kind, shape, raw[group]) for group in range(groups) for kind, shape, raw in cut]


def assemble(
    recipe: Recipe,
    fetch: Callable[[str], tuple[Bytes, str, tuple[int, ...]]],
    dtype: torch.dtype,
    device: torch.device | str,
    block: tuple[int, int] = (128, 128),
) -> torch.Tensor:
    """The parameter as a fresh tensor of `dtype` on `device`. `fetch` gives a stored tensor's bytes, type and shape; `block` is the
    rows and columns that share one factor of a part's `scale`."""
    import torch

    from ktopt.weights.dequantize import dequantize, dequantize_into

    out = torch.empty(recipe.shape, dtype=torch.float32 if recipe.after else dtype, device="cpu" if recipe.after else device)
    placed = out.view(recipe.view)
    for part in recipe.parts if out.numel() else ():
        raw, kind, shape = fetch(part.stored)
        raw = gathered(part, raw, kind, shape)
        into = placed[part.at] if part.at else placed
        if part.scale:
            _scaled_into(into, raw, kind, fetch(part.scale), block)
        elif part.transposed:
            into.copy_(dequantize(raw, kind, dtype).view(shape).mT)
        else:
            dequantize_into(into, raw.reshape(*into.shape[:-1], -1), kind)
    if recipe.after == "minus_one":
        out.sub_(1)
    elif recipe.after == "log_of_negative":
        out.neg_().log_()
    return out.to(device=device, dtype=dtype) if recipe.after else out


def _scaled_into(
    into: torch.Tensor, raw: Bytes, kind: str, scale: tuple[Bytes, str, tuple[int, ...]], block: tuple[int, int]
) -> None:
    """A matrix times its block factors, in float32, a strip of blocks at a time."""
    from ktopt.weights.dequantize import dequantize

    rows, columns = block
    factors = dequantize(scale[0], scale[1]).view(scale[2])
    if into.ndim != 2 or tuple(factors.shape) != (-(-into.shape[0] // rows), -(-into.shape[1] // columns)):
        raise WeightError(
            f"its scales are {list(factors.shape)}, which do not fit a {list(into.shape)} matrix in blocks of {list(block)}"
        )
    for strip, start in enumerate(range(0, into.shape[0], rows)):
        wide = factors[strip].repeat_interleave(columns)[: into.shape[1]]
        into[start : start + rows].copy_(dequantize(raw[start : start + rows], kind).mul_(wide))


def rotary_rows(heads: int, rows: int) -> Rows:
    """Rows of a query or key projection stored with each head's rotary pairs side by side, in the order that transformers has
    them in: all first halves, then all second halves."""

    def order() -> np.ndarray[Any, Any]:
        import numpy as np

        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    return order


def grouped_rows(groups: int, sizes: tuple[int, ...]) -> Rows:
    """Rows stored as all groups' first blocks, all groups' second blocks, ..., in the order that has each group's blocks together.
    `sizes` are the rows of one block of each kind."""

    def order() -> np.ndarray[Any, Any]:
        import numpy as np

        starts = [groups * sum(sizes[:i]) for i in range(len(sizes))]
        blocks = [s + np.arange(groups * n).reshape(groups, n) for s, n in zip(starts, sizes, strict=True)]
        return np.concatenate(blocks, axis=1).reshape(-1)

    return order
