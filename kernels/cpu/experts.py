"""The experts of one layer in one call of the CPU kernels, on weights as they are stored.

Legend: T tokens, K experts chosen for each, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import KtoptError
from ktopt.kernels.cpu import Blocks, _needed

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("silu", "gelu_tanh", "relu", "gelu", "quick_gelu", "relu2")
"""What may follow the gate's product, by transformers' names (gelu_tanh has others there), in the kernels' order."""


class Experts:
    """A layer's experts: down(activation(gate(x)) * up(x)), weighted and summed over a token's choices.

    count       E
    gate_up     gate and up of all experts: one matrix (E * 2I, H) with each expert's gate above its up, or the gates' and the ups'
                (E * I, H), or a gate and an up (I, H) for each expert in turn
    down        one matrix (E * H, I), or one (H, I) for each expert
    activation  one of ACTIVATIONS
    shared      gate, up and down of an expert that every token meets, of its own intermediate size; or none

    Matrices may be of different storage types. KtoptError where they don't fit together.
    """

    def __init__(
        self, count: int, gate_up: Sequence[Blocks], down: Sequence[Blocks], activation: str, shared: Sequence[Blocks] = ()
    ) -> None:
        self.count, self.gate_up, self.down, self.activation, self.shared = count, tuple(gate_up), tuple(down), activation, shared
        if activation not in ACTIVATIONS:
            raise KtoptError(f"there is no CPU kernel for the activation {activation}; there are {', '.join(ACTIVATIONS)}")
        numbers: list[int] = []
        for matrices in zip(_gates_and_ups(self.gate_up, count), _each(self.down, count, 1), strict=True):
            for call in (*matrices[0], *matrices[1]):
                numbers += call
        for matrix in shared:
            numbers += matrix.call
        self._run = _needed().run_experts
        try:
            self._object = _needed().experts(ACTIVATIONS.index(activation), bool(shared), *numbers)
        except ValueError as error:
            raise KtoptError(str(error)) from None
        self.hidden = self.down[0].rows // (count if len(self.down) == 1 else 1)

    @property
    def object(self) -> Any:
        """The extension's own object, for other kernels that run these experts."""
        return self._object

    @property
    def nbytes(self) -> int:
        """Of all matrices."""
        return sum(matrix.nbytes for matrix in (*self.gate_up, *self.down, *self.shared))

    def __deepcopy__(self, memo: Any) -> Experts:
        """Itself: it only reads."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Experts, (self.count, self.gate_up, self.down, self.activation, self.shared)

    def __call__(
        self,
        x_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
        threads: int,
        shared_weights_T: torch.Tensor | None = None,
        add: bool = False,
    ) -> None:
        """Write the weighted sums into out (T, H), or add them to what is there.

        x float32 or bfloat16, index int64 or int32, weights and out float32, all contiguous on the CPU (out's last dimension is
        enough). The shared expert's result counts `shared_weights` times, float32, or once. The sum is in the order of experts,
        whatever the number of threads. ValueError where shapes or dtypes don't fit, and for an expert that isn't there: out is
        untouched then. Releases the GIL.
        """
        tokens, chosen = index_TK.shape
        shapes_fit = x_TH.shape == out_TH.shape == (tokens, self.hidden) and weights_TK.shape == index_TK.shape
        if not shapes_fit or (shared_weights_T is not None and shared_weights_T.shape != (tokens,)):
            raise ValueError(
                f"x {list(x_TH.shape)}, index {list(index_TK.shape)}, weights {list(weights_TK.shape)} and out "
                f"{list(out_TH.shape)} don't fit each other and a hidden size of {self.hidden}"
            )
        _check_dtypes(x_TH, index_TK, weights_TK, out_TH, shared_weights_T)
        if not tokens:
            return
        self._run(
            self._object,
            x_TH.data_ptr(),
            x_TH.element_size() == 2,
            tokens,
            index_TK.data_ptr(),
            index_TK.element_size() == 8,
            weights_TK.data_ptr(),
            chosen,
            0 if shared_weights_T is None else shared_weights_T.data_ptr(),
            out_TH.data_ptr(),
            out_TH.stride(0) if tokens > 1 else self.hidden,
            add,
            threads,
        )


def _check_dtypes(x: Any, index: Any, weights: Any, out: Any, shared_weights: Any) -> None:
    floats = [weights, out] + ([] if shared_weights is None else [shared_weights])
    names = [str(tensor.dtype) for tensor in (x, index, *floats)]
    right = names[0] in ("torch.float32", "torch.bfloat16") and names[1] in ("torch.int64", "torch.int32")
    if not right or any(name != "torch.float32" for name in names[2:]):
        raise ValueError(f"x, index, weights and out can't be {', '.join(names)}")
    dense = all(tensor.is_contiguous() for tensor in (x, index, *floats[:1], *floats[2:])) and out.stride(1) == 1
    if not dense or any(tensor.device.type != "cpu" for tensor in (x, index, *floats)):
        raise ValueError("x, index, weights and out must be contiguous and on the CPU")


Call = tuple[int, ...]


def _each(stack: Sequence[Blocks], count: int, matrices: int) -> Iterator[list[Call]]:
    """Each expert's matrices, as the extension takes them: one after the other in one stack, or each by itself."""
    if len(stack) not in (1, count * matrices):
        raise KtoptError(f"{len(stack)} matrices aren't those of {count} experts")
    for expert in range(count):
        if len(stack) > 1 or count * matrices == 1:
            yield [matrix.call for matrix in stack[expert * matrices : (expert + 1) * matrices]]
        else:
            yield [_piece(stack[0], expert * matrices + i, count * matrices) for i in range(matrices)]


def _gates_and_ups(stack: Sequence[Blocks], count: int) -> Iterator[list[Call]]:
    if len(stack) == 2:
        for gate, up in zip(_each(stack[:1], count, 1), _each(stack[1:], count, 1), strict=True):
            yield gate + up
    else:
        yield from _each(stack, count, 2)


def _piece(stack: Blocks, number: int, count: int) -> Call:
    """Piece `number` of `count` equal ones of a stack's rows."""
    kind, address, rows, columns, nbytes = stack.call
    if rows % count:
        raise KtoptError(f"{rows} rows can't be shared out to {count} matrices")
    return kind, address + number * (nbytes // count), rows // count, columns, nbytes // count
