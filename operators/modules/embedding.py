"""KEmbedding with KEmbeddingCPU: the table stays in its file's blocks, and only rows that are asked for become numbers."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu
from ktopt.operators.modules.linear import cpu_kernels
from ktopt.operators.modules.stored import HoldsBlocks


class KEmbedding(HoldsBlocks, nn.Embedding):
    """Rows of a table: ids (...) of integers to (..., embedding_dim) in the plan's dtype, on the CPU.

    Rows equal those of the table dequantised to that dtype, bit for bit. What a subclass of nn.Embedding does to its rows (Gemma's
    scales them, others norm them) is done by that class itself, to the rows looked up. IndexError for an id that is no row. The
    table is never dequantised as a whole and gets no gradient.
    """

    own: nn.Embedding | None
    """The original without its table, where its class computes more than looking up."""

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        """A meta module of the original's size; with KEmbeddingTorch, or without CPU kernels, the original itself.

        KtoptError for a table that torch renorms as it is read (max_norm), and for a class whose result isn't made of the rows of
        its ids one by one, such as positions that it counts itself.
        """
        if context.op != "KEmbeddingCPU":
            context.require_op("KEmbeddingTorch")
            return original
        if not cpu_kernels("KEmbeddingCPU", "KEmbeddingTorch"):
            return original
        if not isinstance(original, nn.Embedding) or original.max_norm is not None:
            raise KtoptError(f"{type(original).__name__} changes its table as it reads it: use `default` for it")
        made = cls(
            original.num_embeddings, original.embedding_dim, original.padding_idx, device="meta", dtype=context.dtype
        ).requires_grad_(False)
        made.dtype = context.dtype
        made.own = None if type(original).forward is nn.Embedding.forward else without_table(original)
        return made.train(original.training)

    def load_tensors(self, context: BuildContext) -> None:
        self.load_weight(context)
        if len(self.parts) > 1:
            raise KtoptError(f"{context.name('weight')} is stored in {len(self.parts)} parts; a table is one tensor")

    def extra_repr(self) -> str:
        return str(super().extra_repr()) + self.stored_as()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input (...) of int32 or int64 to (..., embedding_dim)."""
        ids_N = input.reshape(-1)
        rows_NC = self.rows(ids_N) if self.parts else functional.embedding(ids_N, self.weight)
        if self.own is not None:
            rows_NC = computed_by(self.own, rows_NC)
        return rows_NC.view(*input.shape, self.embedding_dim)

    def rows(self, ids_N: torch.Tensor) -> torch.Tensor:
        """The table's rows of these ids: (N, embedding_dim) in `dtype`. TypeError for ids that are no integers."""
        if ids_N.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"token ids are int64 or int32, not {ids_N.dtype}")
        held = torch.bfloat16 if self.dtype is torch.bfloat16 else torch.float32
        out_NC = torch.empty(ids_N.numel(), self.embedding_dim, dtype=held)
        cpu.rows(self.parts[0][1], ids_N.long().contiguous(), out_NC, torch.get_num_threads())
        return out_NC.to(self.dtype)


def without_table(original: nn.Embedding) -> nn.Embedding:
    """A copy of an embedding without its table, for `computed_by`. KtoptError where its class computes not row by row."""
    name = type(original).__name__
    own = copy.copy(original)
    own._parameters, own._modules = {}, dict(original._modules)
    own._buffers, own._non_persistent_buffers_set = dict(original._buffers), set(original._non_persistent_buffers_set)
    own.padding_idx = None  # it concerns gradients, and must be a row of the table
    own.__dict__["weight"] = torch.empty(0, original.embedding_dim)
    if len(original._parameters) > 1 or set(own._buffers) - own._non_persistent_buffers_set or own._modules:
        raise KtoptError(f"{name} holds more weights than its table: use `default` for it")
    probe = copy.copy(own)
    with torch.device("cpu"), torch.no_grad():
        probe._buffers = {key: torch.full_like(value, 2, device="cpu") for key, value in own._buffers.items() if value is not None}
        rows, ids = torch.arange(4.0 * original.embedding_dim).view(4, -1) - original.embedding_dim, torch.tensor([2, 0, 3])
        try:
            by_rows = torch.equal(computed_by(probe, rows)[ids], computed_by(probe, rows[ids]))
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            by_rows = False
    if not by_rows:
        raise KtoptError(f"{name} computes more than the rows of its ids one by one: use `default` for it")
    return own


def computed_by(own: nn.Embedding, rows_NC: torch.Tensor) -> torch.Tensor:
    """What an embedding's class makes of the rows of its table, these being the table."""
    table = copy.copy(own)  # a call of its own: others may be running
    table.__dict__["weight"] = rows_NC
    result: torch.Tensor = type(own).forward(table, torch.arange(len(rows_NC), device=rows_NC.device))
    return result
