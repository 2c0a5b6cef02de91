"""KTransformersExperts on two devices: a layer's hot experts on one, the others on another.

Each side is an experts module of its own, with its device and op, over some of the layer's experts. A token's choices go to the
side that has the expert; the results are weighted there, brought together and summed.
Shapes: T tokens, K experts chosen for each, S of these choices that one side has, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses import FakeTensor

from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext, Loads
from ktopt.operators.experts import ExpertsConfig
from ktopt.operators.hot_experts import PIECE_TOKENS
from ktopt.popularity import hot_ids
from ktopt.weights import StoredTensor, WeightError

Part = tuple[str, tuple[int, ...], Any]
"""A stored matrix, or a stack of them: type, shape and bytes."""
NAMES = ("gate_up_proj", "down_proj")


@dataclass(eq=False)
class Side:
    """Some of a layer's experts, on one device.

    ids      their numbers in the layer, in order
    slots    (E,) of each of the layer's experts its number here, -1 for those of the other side; on the CPU
    experts  the module that computes them
    """

    ids: tuple[int, ...]
    slots: torch.Tensor
    experts: Any
    device: torch.device


class KSplitExperts(nn.Module):
    """Routed experts, called as transformers v5 calls its own: experts(hidden_states, top_k_index, top_k_weights).

    gate_up_proj (E, 2I, H) and down_proj (E, H, I) read as fresh numbers: meant for code that looks at them, and slow. `sides` are
    the hot experts and the others, which are no children: a state dict has the numbers of both under the original's names. Sums are
    in float32, and in a fixed order.
    """

    def __init__(self, original: Any, sides: tuple[Side, Side], out_device: str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.sides, self.out_device, self.dtype = sides, out_device, dtype
        self.num_experts, self.hidden_dim, self.intermediate_dim = original.down_proj.shape
        self.act_fn, self.loaded = original.act_fn, False
        for name in NAMES:
            empty = torch.empty(getattr(original, name).shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    @classmethod
    def build(cls, original: Any, context: BuildContext) -> nn.Module:
        """Both sides on the meta device. `original` is one that KTransformersExperts can replace."""
        from ktopt.operators.modules.experts import experts_like

        count, made = original.down_proj.shape[0], []
        for ids, own in _contexts(context, count):
            place = {number: slot for slot, number in enumerate(ids)}
            slots = torch.tensor([place.get(number, -1) for number in range(count)], device="cpu")
            made.append(Side(ids, slots, experts_like(original, own, len(ids)), own.device))
        return cls(original, (made[0], made[1]), getattr(context.config, "out_device", None), context.dtype)

    def load_tensors(self, context: BuildContext) -> None:
        """Each side takes its experts' weights, and reads no others where the source has them apart."""
        for side, (_, own) in zip(self.sides, _contexts(context, self.num_experts), strict=True):
            if isinstance(side.experts, Loads):
                side.experts.load_tensors(own)
                continue
            tensors: Any = own.tensors
            for name in NAMES:
                read = tensors.read(own.name(name), own.dtype, own.device)
                side.experts._parameters[name] = nn.Parameter(read, requires_grad=False)
        for name in NAMES:
            del self._parameters[name]
        self.loaded = True

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states (T, H), top_k_index (T, K) of integers, top_k_weights (T, K) to (T, H) in hidden_states' dtype, on the
        device of hidden_states or on out_device. KtoptError for the number of an expert that isn't there."""
        index_TK = top_k_index.cpu()
        self._check(index_TK)
        pieces = zip(*(each.split(PIECE_TOKENS) for each in (hidden_states, index_TK, top_k_weights)), strict=True)
        made = [self._piece(*piece) for piece in pieces]
        result_TH = torch.cat(made) if len(made) > 1 else made[0]
        return result_TH.to(hidden_states.dtype)

    def _piece(self, hidden_states: torch.Tensor, index_TK: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """So many tokens, in float32."""
        x_TH = hidden_states.float()
        target = torch.device(self.out_device) if self.out_device else hidden_states.device
        # the hot side first: what an accelerator is given runs while the CPU computes
        found = [self._one(side, x_TH, index_TK, top_k_weights) for side in self.sides]
        there = [result_TH.to(target) for result_TH in found if result_TH is not None]
        return sum(there[1:], there[0]) if there else torch.zeros_like(x_TH, device=target)

    def _one(self, side: Side, x_TH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor | None:
        """What one side adds to each token (T, H) in float32, on its device; None where no token chose any of its experts."""
        tokens, chosen = index_TK.shape
        if isinstance(index_TK, FakeTensor):  # only shapes and devices count, and which are chosen is a value
            slot_S = torch.zeros_like(index_TK).reshape(-1)
            place_S = torch.arange(tokens * chosen, device=slot_S.device)
        else:
            slots = side.slots[index_TK.long()].reshape(-1)
            place_S = (slots >= 0).nonzero().squeeze(1)
            slot_S = slots[place_S]
        if not place_S.numel():
            return None
        weight_S = weights_TK.reshape(-1).index_select(0, place_S.to(weights_TK.device)).to(side.device)
        x_TH, place_S, slot_S = x_TH.to(side.device), place_S.to(side.device), slot_S.to(side.device)
        rows_SH = x_TH.index_select(0, place_S // chosen)
        result_SH = side.experts(rows_SH, slot_S.unsqueeze(1), weight_S.unsqueeze(1))
        if x_TH.is_cpu:  # where adding in place is in a fixed order
            return torch.zeros_like(x_TH).index_add_(0, place_S // chosen, result_SH)
        by_choice = x_TH.new_zeros(tokens * chosen, self.hidden_dim).index_copy_(0, place_S, result_SH)
        return by_choice.view(tokens, chosen, self.hidden_dim).sum(dim=1)

    def _check(self, index_TK: torch.Tensor) -> None:
        if isinstance(index_TK, FakeTensor) or not index_TK.numel():
            return
        least, most = (int(bound) for bound in index_TK.aminmax())
        if least < 0 or most >= self.num_experts:
            wrong = least if least < 0 else most
            raise KtoptError(f"experts: a token chose expert {wrong}, and there are experts 0 to {self.num_experts - 1}")

    def __getattr__(self, name: str) -> Any:
        if name in NAMES and self.__dict__.get("loaded"):
            return self._numbers(name)
        return super().__getattr__(name)

    def _numbers(self, name: str) -> torch.Tensor:
        """The weights of all experts, in their order."""
        parts = [getattr(side.experts, name).to("cpu", self.dtype) for side in self.sides]
        order = torch.tensor([number for side in self.sides for number in side.ids]).argsort()
        return torch.cat(parts).index_select(0, order)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.loaded:
            destination.update({f"{prefix}{name}": getattr(self, name) for name in NAMES})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        given = {name: state_dict.get(f"{prefix}{name}") for name in NAMES}
        for side in self.sides:
            ids = torch.tensor(side.ids)
            own = {name: whole.index_select(0, ids) for name, whole in given.items() if whole is not None}
            side.experts._load_from_state_dict({f"{prefix}{name}": part for name, part in own.items()}, prefix, *others)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Both sides follow: moved, they are both where the model is moved to."""
        for side in self.sides:
            side.experts._apply(fn)
            held = next(chain(side.experts.parameters(), side.experts.buffers()), None)
            side.device = held.device if held is not None else torch.device("cpu")
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        hot, cold = (f"{len(side.ids)} on {side.device} ({type(side.experts).__name__})" for side in self.sides)
        return f"{self.num_experts} experts: {hot}, {cold}, hidden={self.hidden_dim}, intermediate={self.intermediate_dim}"


def _contexts(context: BuildContext, count: int) -> Iterator[tuple[tuple[int, ...], BuildContext]]:
    """The hot experts and the others: their numbers, and what their module is built from."""
    config: Any = context.config
    assert isinstance(config, ExpertsConfig)
    hot = hot_ids(config, context.module.layer)
    cold = tuple(sorted(set(range(count)) - set(hot)))
    device = torch.device(config.hot_device) if config.hot_device else context.device
    for ids, own in ((hot, replace(config, generate_op=config.hot_op)), (cold, config)):
        tensors = None if context.tensors is None else Chosen(context.tensors, ids, count)
        yield (
            ids,
            replace(
                context,
                config=replace(own, hot_experts=None, out_device=None),
                device=device if ids is hot else context.device,
                tensors=tensors,
            ),
        )


@dataclass
class Chosen:
    """A source's experts of one layer as the source of some of them."""

    tensors: Any
    ids: tuple[int, ...]
    count: int

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def stored(self, name: str) -> StoredTensor:
        stored: StoredTensor = self.tensors.stored(name)
        return stored

    def raw(self, name: str) -> list[Part]:
        """The stored matrices of these experts: each one's gate and up, or its down. WeightError where they aren't stored so."""
        parts: list[Part] = self.tensors.raw(name)
        each = 2 if name.endswith(NAMES[0]) else 1
        if len(parts) == 1:
            found = list(_pieces(parts[0], self.count * each))
        elif len(parts) == each == 2:
            gates, ups = (_pieces(part, self.count) for part in parts)
            found = list(chain.from_iterable(zip(gates, ups, strict=True)))
        else:
            found = parts
        if len(found) != self.count * each:
            raise WeightError(f"{name} is stored in {len(parts)} parts, which aren't the matrices of {self.count} experts")
        return [found[number * each + i] for number in self.ids for i in range(each)]

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """The weights of these experts, (experts, rows, columns) in `dtype` on `device`."""
        from ktopt.weights.dequantize import dequantize_into

        try:
            parts = self.raw(name)
        except WeightError:
            whole: torch.Tensor = self.tensors.read(name, dtype, "cpu")
            return whole.index_select(0, torch.tensor(self.ids)).to(device)
        rows, columns = parts[0][1]
        out = torch.empty(len(parts), rows, columns, dtype=dtype, device=device)
        for into, (kind, _, data) in zip(out, parts, strict=True):
            dequantize_into(into, data.reshape(rows, -1), kind)
        return out.view(len(self.ids), -1, columns)


def _pieces(part: Part, count: int) -> Iterator[Part]:
    """So many matrices of one size, of a stack of them."""
    kind, shape, data = part
    rows, flat = int(numpy.prod(shape[:-1])), data.reshape(-1)
    if rows % count or flat.nbytes % count:
        raise WeightError(f"{rows} rows can't be shared out to {count} matrices")
    size = len(flat) // count
    for number in range(count):
        yield kind, (rows // count, shape[-1]), flat[number * size : (number + 1) * size]
