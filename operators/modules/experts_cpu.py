"""KTransformersExperts with KExpertsCPU: a layer's experts on their weights as they are stored, by the CPU kernels.

One call computes gate, up, activation, down and the weighted sum, for one token and for thousands. A storage type without a kernel
is dequantised at load. Weights in memory are used where they lie, for few tokens; torch multiplies many faster.
Shapes: T tokens, K experts chosen for each, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu
from ktopt.kernels.cpu.experts import Experts
from ktopt.operators.modules.experts import KTransformersExperts
from ktopt.operators.modules.stored import raw_parts

FEW_TOKENS = 16
"""Up to so many tokens the kernels are clearly faster than torch's grouped product on weights in memory (measured with 8 of 64
experts in bfloat16, on 2 busy cores with AVX512: twice as fast at 16 tokens, level at 60)."""
KERNEL_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "ReLU": "relu", "ReLUSquaredActivation": "relu2", "QuickGELUActivation": "quick_gelu",
    "GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
}  # fmt: skip
"""Classes of torch and of transformers' activations, and the kernels' names of what they compute."""
PLAIN = {"F32", "F16", "BF16"}
NAMES = ("gate_up_proj", "down_proj")


def kernel_activation(act_fn: nn.Module) -> str:
    """The kernels' name of an activation, "" where they have none."""
    if type(act_fn) is nn.GELU:
        return "gelu" if act_fn.approximate == "none" else "gelu_tanh"
    return KERNEL_ACTIVATIONS.get(type(act_fn).__name__, "")


class KExpertsCPU(KTransformersExperts):
    """Routed experts, called as KTransformersExperts: experts(hidden_states, top_k_index, top_k_weights).

    `stored` has the weights in the blocks of a file, mapped; it is None where they are parameters. gate_up_proj (E, 2I, H) and
    down_proj (E, H, I) read as fresh dequantised tensors from blocks: meant for code that looks at them, and slow. Block types meet
    activations rounded to 8 bits (see kernels/cpu), sums are in float32, experts in a fixed order. The kernels have no backward
    pass: where autograd asks for gradients, KExpertsTorch computes them through dequantised weights.
    """

    def __init__(self, *args: Any, **tensor: Any) -> None:
        super().__init__(*args, **tensor)
        self.dtype: torch.dtype = tensor["dtype"]
        self.stored: Experts | None = None
        self._seen: Experts | None = None

    def load_tensors(self, context: BuildContext) -> None:
        """Take the weights as they are stored; where they are numbers already, or there is no kernel for a type, as numbers."""
        tensors: Any = context.tensors
        gate_up, down = [stored_blocks(context, name) for name in NAMES]
        if gate_up and down and not {part.kind for part in (*gate_up, *down)} <= PLAIN:
            self.stored = Experts(self.num_experts, gate_up, down, kernel_activation(self.act_fn))
            for name in NAMES:
                del self._parameters[name]
            return
        for name in NAMES:
            read = tensors.read(context.name(name), context.dtype, context.device)
            self._parameters[name] = read if isinstance(read, nn.Parameter) else nn.Parameter(read, requires_grad=False)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states (T, H), top_k_index (T, K) of integers, top_k_weights (T, K) to (T, H) in hidden_states' dtype. KtoptError
        for the number of an expert that isn't there."""
        asking = (hidden_states, top_k_weights, *self._parameters.values())
        asks_gradient = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in asking)
        experts = None if asks_gradient or not hidden_states.is_cpu else self.stored or self._in_memory(hidden_states.shape[0])
        if experts is None or experts.activation != kernel_activation(self.act_fn):
            self._check(top_k_index)
            return super().forward(hidden_states, top_k_index, top_k_weights)
        x_TH = hidden_states if hidden_states.dtype in (torch.float32, torch.bfloat16) else hidden_states.float()
        index_TK = top_k_index if top_k_index.dtype in (torch.int64, torch.int32) else top_k_index.long()
        out_TH = torch.empty(hidden_states.shape, dtype=torch.float32)
        try:
            experts(
                x_TH.contiguous(),
                index_TK.contiguous(),
                top_k_weights.float().contiguous(),
                out_TH,
                torch.get_num_threads(),
            )
        except ValueError as error:
            raise KtoptError(f"experts: {error}") from None
        result_TH = out_TH.to(hidden_states.dtype)
        return result_TH if self.out_device is None else result_TH.to(self.out_device)

    def _check(self, top_k_index: torch.Tensor) -> None:
        """KtoptError for experts that aren't there: torch's products would read nothing for them and leave what was in memory."""
        if isinstance(top_k_index, FakeTensor) or not top_k_index.is_cpu or not top_k_index.numel():
            return
        least, most = (int(bound) for bound in top_k_index.aminmax())
        if least < 0 or most >= self.num_experts:
            wrong = least if least < 0 else most
            raise KtoptError(f"experts: a token chose expert {wrong}, and there are experts 0 to {self.num_experts - 1}")

    def _in_memory(self, tokens: int) -> Experts | None:
        """The parameters where they are now, for the kernels; None where torch multiplies them faster, or the kernels can't."""
        weights = [self._parameters[name] for name in NAMES]
        if tokens > FEW_TOKENS or not all(w.is_cpu and w.is_contiguous() and not isinstance(w, FakeTensor) for w in weights):
            return None
        seen = self._seen
        if seen is None or [each[0].call[1] for each in (seen.gate_up, seen.down)] != [w.data_ptr() for w in weights]:
            gate_up, down = [cpu.tensor_blocks(w.detach().flatten(0, 1)) for w in weights]
            if gate_up is None or down is None:
                return None
            self._seen = Experts(self.num_experts, (gate_up,), (down,), kernel_activation(self.act_fn))
        return self._seen

    def __getattr__(self, name: str) -> Any:
        if name in NAMES and self.__dict__.get("stored") is not None:
            return self._numbers(name)
        return super().__getattr__(name)

    def _numbers(self, name: str) -> torch.Tensor:
        """A stored weight dequantised."""
        stored = self.stored
        assert stored is not None
        parts = []
        for part in stored.gate_up if name == "gate_up_proj" else stored.down:
            wide = torch.empty(part.rows, part.columns, dtype=torch.bfloat16 if self.dtype is torch.bfloat16 else torch.float32)
            cpu.dequantize(part, wide, torch.get_num_threads())
            parts.append(wide.to(self.dtype))
        if len(parts) == 2:  # all gates, all ups
            parts = [torch.cat([part.view(self.num_experts, -1, part.shape[1]) for part in parts], dim=1)]
        return torch.cat(parts).view(self.num_experts, -1, parts[0].shape[-1])

    def _become_numbers(self) -> None:
        """Hold the weights as parameters from now on."""
        made = {name: nn.Parameter(self._numbers(name), requires_grad=False) for name in NAMES}
        self.stored = None
        self._parameters.update(made)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.stored:
            destination.update({f"{prefix}{name}": self._numbers(name) for name in NAMES})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        if self.stored and any(f"{prefix}{name}" in state_dict for name in NAMES):
            self._become_numbers()
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """A change of dtype is what weights read as and leaves the blocks as they are; moved off the CPU they become numbers."""
        probe = fn(torch.empty(0, dtype=self.dtype))
        if self.stored and probe.device.type != "cpu":
            self._become_numbers()
        self.dtype = probe.dtype
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Without the view of parameters, which is made anew."""
        return {**self.__dict__, "_seen": None}

    def extra_repr(self) -> str:
        parts = (*self.stored.gate_up, *self.stored.down) if self.stored else ()
        kinds = ", ".join(dict.fromkeys(part.kind for part in parts))
        held = f", stored as {kinds}" if kinds else ""
        return f"{self.num_experts} experts, hidden={self.hidden_dim}, intermediate={self.intermediate_dim}{held}"


def stored_blocks(context: BuildContext, name: str) -> list[cpu.Blocks]:
    """The stored parts of all experts' weights that the kernels can take, in order: one stack, gates and ups, or a matrix for each
    expert. Empty where one of them can't be taken.

    Says so in the log where there is no kernel for a type. KtoptError for a tensor with scales that are no numbers.
    """
    parts, full = raw_parts(context, name, "these experts are"), context.name(name)
    made = []
    for kind, shape, data in parts:
        *stack, columns = shape
        try:
            made.append(cpu.blocks(kind, torch.Size(stack).numel(), columns, data, torch.get_num_threads()))
        except KtoptError as error:
            raise KtoptError(f"{full} ({kind}): {error}") from None
    return made
