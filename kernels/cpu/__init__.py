"""Matrix products on the CPU over weights as GGUF files store them: C++, chosen by what the CPU has.

`_cpu` is the extension that setup.py builds from the C++ files here; where it is missing, `available` says why. The environment
variable KTOPT_CPU_ISA forces an instruction set: avx512bf16, avx512vnni, avx512, avx2 or scalar.

Quantised weights meet activations rounded to 8 bits, one scale for each 32 of them, and sums are kept in float32; plain
floating-point weights meet activations as they are. Legend: T tokens, R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import KtoptError, UsageError
from ktopt.weights.ggml_types import BY_NAME

if TYPE_CHECKING:
    import numpy
    import torch

KINDS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""The storage types that have a kernel."""
ISAS = ("avx512bf16", "avx512vnni", "avx512", "avx2", "scalar")
"""Instruction sets that kernels are written for, best first; `isas` tells which run here."""
ISA_VARIABLE = "KTOPT_CPU_ISA"


@cache
def _extension() -> tuple[Any, str]:
    """The extension, or None and why it can't be used."""
    try:
        from ktopt.kernels.cpu import _cpu  # type: ignore[attr-defined]
    except ImportError as error:
        return None, f"the CPU kernels were not built when ktopt was installed ({error}); install it where there is a C++ compiler"
    forced = os.environ.get(ISA_VARIABLE)
    if forced and not (forced in ISAS and _cpu.set_isa(forced)):
        here = ", ".join(name for name in ISAS if _cpu.set_isa(name))
        raise UsageError(f"{ISA_VARIABLE}={forced}: this CPU runs {here}")
    return _cpu, ""


def available() -> tuple[bool, str]:
    """Whether the kernels can be used, and if not, why. UsageError where KTOPT_CPU_ISA names what this CPU can't run."""
    extension, reason = _extension()
    return extension is not None, reason


def isa() -> str:
    """The instruction set that the kernels run on."""
    name: str = _needed().isa()
    return name


def isas() -> tuple[str, ...]:
    """The instruction sets that this CPU can run, best first."""
    extension, now = _needed(), isa()
    found = tuple(name for name in ISAS if extension.set_isa(name))
    extension.set_isa(now)
    return found


def use_isa(name: str | None) -> None:
    """Run this instruction set from now on, in all threads; None for the best. UsageError for one that this CPU can't run."""
    if not _needed().set_isa(name):
        raise UsageError(f"this CPU can't run {name}; it runs {', '.join(isas())}")


def _needed() -> Any:
    extension, reason = _extension()
    if extension is None:
        raise KtoptError(reason)
    return extension


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Blocks:
    """A matrix (rows, columns) in the blocks of a storage type, in memory that `owner` keeps alive; made by `blocks`."""

    kind: str
    rows: int
    columns: int
    owner: Any
    call: tuple[int, int, int, int, int]
    """What the extension takes for it: type number, address, rows, columns, bytes."""

    @property
    def nbytes(self) -> int:
        return self.call[4]

    def __deepcopy__(self, memo: Any) -> Blocks:
        """Itself: the memory is only read, and `owner` keeps it alive."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: the bytes themselves, since an address means nothing in another process."""
        if not hasattr(self.owner, "ctypes"):
            return tensor_blocks, (self.owner,)
        return blocks, (self.kind, self.rows, self.columns, self.owner.copy())


def blocks(kind: str, rows: int, columns: int, data: numpy.ndarray[Any, Any], threads: int = 1) -> Blocks:
    """A matrix from its stored bytes, uint8 of any shape, contiguous; nothing is copied.

    KtoptError for a type without a kernel, for bytes that aren't rows * columns numbers of it, and for scales that are inf or NaN.
    """
    if kind not in KINDS:
        raise KtoptError(f"there is no CPU kernel for the storage type {kind}")
    layout = BY_NAME[kind]
    expected = rows * layout.row_bytes(columns)
    if columns % layout.block_elements or data.nbytes != expected or not data.flags.c_contiguous:
        raise KtoptError(f"{rows} rows of {columns} numbers in {kind} take {expected} bytes, and {data.nbytes} were given")
    made = Blocks(kind, rows, columns, data, (layout.number, data.ctypes.data, rows, columns, expected))
    bad = _needed().first_bad_row(*made.call, threads)
    if bad >= 0:
        raise KtoptError(f"row {bad} has a scale that is infinite or not a number")
    return made


def tensor_blocks(weight_RC: torch.Tensor) -> Blocks | None:
    """A contiguous floating-point tensor on the CPU as a matrix, nothing copied; None for a dtype without a kernel."""
    kind = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}.get(str(weight_RC.dtype))
    if kind is None:
        return None
    rows, columns = weight_RC.shape
    return Blocks(kind, rows, columns, weight_RC, (BY_NAME[kind].number, weight_RC.data_ptr(), rows, columns, weight_RC.nbytes))


def product() -> Callable[..., None]:
    """The extension's function beneath `linear`, for callers that see to shapes, dtypes and memory themselves:
    product(*weight.call, x address, x is bfloat16, T, out address, out's row stride, threads)."""
    function: Callable[..., None] = _needed().linear
    return function


def takes_many(weight: Blocks) -> bool:
    """Whether `linear` has a kernel of its own for many tokens of this type, on the instruction set that runs: faster at any number
    of tokens than dequantising and torch's product (AVX512 VNNI, quantised types). Memory doesn't grow with the tokens then."""
    fast: bool = _needed().has_product(weight.call[0])
    return fast


def linear(weight: Blocks, x_TC: torch.Tensor, out_TR: torch.Tensor, threads: int) -> None:
    """out = x @ weight.T, written into `out`, whose rows may lie further apart than `weight.rows` (a slice of a wider result).

    x (T, C) float32 or bfloat16, contiguous; out (T, R) float32, its last dimension contiguous; both on the CPU, T at least 1.
    ValueError where shapes or dtypes don't fit. Releases the GIL; may be called from several threads at once.
    """
    tokens, columns = x_TC.shape
    wide = x_TC.element_size() == 4
    if columns != weight.columns or out_TR.shape != (tokens, weight.rows) or not x_TC.is_contiguous() or out_TR.stride(1) != 1:
        raise ValueError(f"x {list(x_TC.shape)} and out {list(out_TR.shape)} don't fit {weight.rows} rows of {weight.columns}")
    if out_TR.element_size() != 4 or not (wide or x_TC.element_size() == 2):
        raise ValueError(f"x must be float32 or bfloat16 and out float32, not {x_TC.dtype} and {out_TR.dtype}")
    _needed().linear(
        *weight.call, x_TC.data_ptr(), not wide, tokens, out_TR.data_ptr(), out_TR.stride(0) if tokens > 1 else weight.rows, threads
    )


def dequantize(weight: Blocks, out_RC: torch.Tensor, threads: int, first: int = 0) -> None:
    """Rows `first` to `first` + R of the weight as numbers, into `out` (R, C), float32 or bfloat16, contiguous, on the CPU.

    float32 is what gguf's own dequantiser gives; bfloat16 is that rounded to nearest. ValueError where the shape doesn't fit.
    """
    rows, columns = out_RC.shape
    if columns != weight.columns or first < 0 or first + rows > weight.rows or not out_RC.is_contiguous():
        raise ValueError(f"out {list(out_RC.shape)} from row {first} doesn't fit {weight.rows} rows of {weight.columns}")
    kind, address, _, _, nbytes = weight.call
    row_bytes = nbytes // weight.rows
    half = out_RC.element_size() == 2
    _needed().dequantize(kind, address + first * row_bytes, rows, columns, rows * row_bytes, out_RC.data_ptr(), half, threads)


def layer_runners(description: dict[str, Any]) -> tuple[Callable[..., None], ...]:
    """A decoder layer as one call: the extension's run_layer, run_latent_layer, run_mlp, run_before_attention,
    run_after_attention and run_paged (module.cpp names what they take), on what module_layer.cpp makes of a description: numbers,
    float32 vectors as (address, epsilon) for norms, lists of matrices as (*Blocks.call, first result, address of the bias or 0).
    What stands at the addresses must outlive the runners.

    x (B, S, H) float32 is read and written. ValueError for what doesn't fit, OverflowError where float16 can't hold what a cache is
    to keep.
    """
    extension = _needed()
    layer = extension.layer(description)
    runners = ("run_layer", "run_latent_layer", "run_mlp", "run_before_attention", "run_after_attention", "run_paged")
    return tuple(partial(getattr(extension, name), layer) for name in runners)


def rows(weight: Blocks, ids: torch.Tensor, out_NC: torch.Tensor, threads: int) -> None:
    """The rows that `ids` (N,) names, int64, as numbers into `out` (N, C), as `dequantize` has them; both contiguous, on the CPU.

    ValueError where shapes or dtypes don't fit, IndexError for an id that is no row.
    """
    count = ids.numel()
    if out_NC.shape != (count, weight.columns) or not ids.is_contiguous() or not out_NC.is_contiguous() or not ids.is_cpu:
        raise ValueError(f"out {list(out_NC.shape)} doesn't fit {count} rows of {weight.columns}, or ids are on {ids.device}")
    if ids.element_size() != 8 or ids.is_floating_point() or out_NC.element_size() not in (2, 4):
        raise ValueError(f"ids must be int64 and out float32 or bfloat16, not {ids.dtype} and {out_NC.dtype}")
    if count:
        _needed().rows(*weight.call, ids.data_ptr(), count, out_NC.data_ptr(), out_NC.element_size() == 2, threads)
