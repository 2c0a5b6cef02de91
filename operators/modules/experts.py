"""KTransformersExperts with KExpertsTorch: all experts of one layer in two grouped matrix products. KExpertsCPU is in
experts_cpu.py.

Shapes: T tokens, K experts chosen for each, S = T * K rows (a token once for each of its experts), E experts, H hidden size,
I intermediate size.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn import functional

from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext
from ktopt.operators.experts import KEXPERTS_MARLIN, not_gated_and_fused
from ktopt.operators.modules.linear import cpu_kernels
from ktopt.operators.modules.low_bit import refuse_older
from ktopt.popularity import hot_ids

log = logging.getLogger(__name__)

OLDEST_GROUPED_CUDA = (8, 0)
"""The compute capability from which torch has a grouped product."""
ROW_ALIGNMENT_BYTES = 16
"""What torch's grouped product asks of a row's length."""


def grouped_product(rows_SH: torch.Tensor, weight_EIH: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows by its matrix: row s of expert e gives weight[e] @ row.

    rows are sorted by expert; ends[e] (int32) is one past the last row of expert e, so an expert without rows has its predecessor's
    end. Returns (S, I) in the rows' dtype, which must be the weight's.
    """
    if isinstance(rows_SH, FakeTensor):  # only shapes and devices count; torch's fake kernel takes bfloat16 alone
        return rows_SH @ weight_EIH.select(0, 0).T
    grouped = getattr(functional, "grouped_mm", None)
    aligned = all(size * weight_EIH.element_size() % ROW_ALIGNMENT_BYTES == 0 for size in weight_EIH.shape[1:])
    if grouped is not None and aligned and has_grouped_product(weight_EIH.device):
        product: torch.Tensor = grouped(rows_SH, weight_EIH.transpose(1, 2), offs=ends_E)
        return product
    result_SI = rows_SH.new_empty(rows_SH.shape[0], weight_EIH.shape[1])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            torch.mm(rows_SH[start:end], weight_EIH[expert].T, out=result_SI[start:end])
            start = end
    return result_SI


@cache
def has_grouped_product(device: torch.device) -> bool:
    """Whether torch multiplies groups in one call there."""
    if device.type == "cuda":
        return bool(torch.cuda.get_device_capability(device) >= OLDEST_GROUPED_CUDA)
    return bool(device.type == "cpu")


class KTransformersExperts(nn.Module):
    """Routed experts, called as transformers v5 calls its own: experts(hidden_states, top_k_index, top_k_weights).

    gate_up_proj (E, 2I, H) and down_proj (E, H, I) in the plan's dtype. An expert computes down(act(gate(x)) * up(x)); results are
    weighted and summed over a token's experts in the wider of both dtypes, and returned in the input's dtype. Sums are in a fixed
    order, so two runs agree bit for bit.
    """

    def __init__(
        self, num_experts: int, hidden_dim: int, intermediate_dim: int, act_fn: nn.Module, out_device: str | None, **tensor: Any
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim = num_experts, hidden_dim, intermediate_dim
        self.out_device = out_device
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_dim, hidden_dim, **tensor), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_dim, intermediate_dim, **tensor), requires_grad=False)
        self.act_fn = act_fn

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        """A meta module of the original's size. A ModuleList of experts is returned as it is: its block calls them one by one.

        KtoptError for experts that compute something else: biases, transposed weights, a gate of their own, no gate, a norm after.
        """
        if isinstance(original, nn.ModuleList):
            return original
        reason = not_gated_and_fused(context.module) or computes_otherwise(original)
        if reason:
            raise KtoptError(f"{context.step.path}: KTransformersExperts can't replace these experts: {reason}")
        if hot_ids(context.config, context.module.layer):
            from ktopt.operators.modules.experts_split import KSplitExperts

            return KSplitExperts.build(original, context).train(original.training)
        out_device = getattr(context.config, "out_device", None)
        return experts_like(original, context, original.down_proj.shape[0], out_device).train(original.training)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states (T, H), top_k_index (T, K) of integers, top_k_weights (T, K) to (T, H) in hidden_states' dtype."""
        tokens, chosen = top_k_index.shape
        # the same sort as transformers' grouped experts, so that rows meet the same kernels and results agree bit for bit
        expert_S, order_S = torch.sort(top_k_index.reshape(-1))
        every_E = torch.arange(self.num_experts, device=expert_S.device, dtype=expert_S.dtype)
        ends_E = torch.searchsorted(expert_S, every_E, right=True, out_int32=True)

        rows_SH = hidden_states.index_select(0, order_S // chosen)
        gate_SI, up_SI = self.grouped("gate_up_proj", rows_SH, ends_E).chunk(2, dim=-1)
        rows_SH = self.grouped("down_proj", self.act_fn(gate_SI) * up_SI, ends_E)

        weighted_SH = rows_SH * top_k_weights.reshape(-1).index_select(0, order_S).unsqueeze(-1)
        by_token_SH = torch.empty_like(weighted_SH).index_copy_(0, order_S, weighted_SH)
        result_TH = by_token_SH.view(tokens, chosen, self.hidden_dim).sum(dim=1).to(hidden_states.dtype)
        return result_TH if self.out_device is None else result_TH.to(self.out_device)

    def grouped(self, name: str, rows: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Each expert's rows times its matrix of that name, in the weight's dtype."""
        weight = getattr(self, name)
        return grouped_product(rows.to(weight.dtype), weight, ends_E)


def experts_like(original: Any, context: BuildContext, count: int, out_device: str | None = None) -> KTransformersExperts:
    """A meta module of so many experts of the original's size, by the op of the context."""
    chosen = KTransformersExperts
    if context.op == "KExpertsMarlin":
        from ktopt.operators.modules.experts_cuda import KExpertsMarlin

        refuse_older(context.device, KEXPERTS_MARLIN.least_sm, context.op)
        chosen = KExpertsMarlin
    elif context.op != "KExpertsCPU":
        context.require_op("KExpertsTorch")
    elif cpu_kernels("KExpertsCPU", "KExpertsTorch"):
        from ktopt.operators.modules.experts_cpu import KExpertsCPU, kernel_activation

        if kernel_activation(original.act_fn):
            chosen = KExpertsCPU
        else:
            log.warning(
                "%s: KExpertsCPU gives way to KExpertsTorch, whose weights take more memory: there is no CPU kernel for the "
                "activation %s",
                context.step.path,
                type(original.act_fn).__name__,
            )
    _, hidden, intermediate = original.down_proj.shape
    return chosen(count, hidden, intermediate, original.act_fn, out_device, device="meta", dtype=context.dtype)


def computes_otherwise(original: nn.Module) -> str:
    """What transformers' experts module computes beyond down(act(gate) * up), or "" for nothing."""
    from transformers.integrations import moe

    name = type(original).__name__
    if not hasattr(original, "act_fn") or getattr(original, "has_gate", None) is not True:
        return f"{name} is not one of transformers' gated experts"
    for flag, what in (
        ("has_bias", "has biases"),
        ("is_transposed", "holds its weights transposed"),
        ("has_post_expert_norm", "norms after each expert"),
    ):
        if getattr(original, flag, False):
            return f"{name} {what}"
    if not getattr(original, "is_concatenated", True):
        return f"{name} interleaves gate and up"
    if type(original)._apply_gate is not moe._default_apply_gate:
        return f"{name} has a gate of its own"
    return ""
