"""KDecoderLayer on the CPU: a decoder layer of transformers that runs as one call of the kernels.

It is the original's class with another forward: children, parameter names and calls stay. Where a call asks for what the kernels
don't do (gradients, a mask of another shape, a cache of another kind), or a child has been given a hook or has been replaced,
the original's forward runs on the same children and the same cache, and the log says why, once for each reason.

Legend: B sequences, S new tokens of each, N tokens that the mask covers, H hidden size.
"""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses import FakeTensor

from ktopt.cache.growing import GrowingLayer, GrowingSlidingLayer, growing_layer
from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu
from ktopt.operators.layer import LayerConfig
from ktopt.operators.modules.fusing import Fused, describe
from ktopt.operators.modules.masks import first_tokens

log = logging.getLogger(__name__)

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""The kernels' numbers of the dtypes that a cache may have."""


class KDecoderLayer(nn.Module):
    """What is mixed into the original's class. `origin` is that class, `kv_dtype` what keys and values are kept in."""

    origin: type[nn.Module]

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        """The original's children under a class of its own. KtoptError where the kernels can't run them, with the reason."""
        if not cpu.available()[0]:
            log.warning("%s is left as it is: %s", context.step.path, cpu.available()[1])
            return original
        made = _blank(type(original))
        made.__dict__.update(original.__dict__)
        made._modules = dict(original._modules)
        made.kv_dtype = getattr(torch, cast(LayerConfig, context.config).kv_dtype)
        described = describe(made)
        if isinstance(described, str):
            raise KtoptError(f"{context.step.path}: KDecoderLayer can't run this {type(original).__name__} as one: {described}")
        return made

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """hidden_states (B, S, H) to the same shape and dtype. Takes what the original's forward takes."""
        made = self._fused(hidden_states, **kwargs) if not args else "arguments given by position"
        if isinstance(made, str):
            _say(self.origin.__name__, made)
            result: torch.Tensor = self.origin.forward(self, hidden_states, *args, **kwargs)
            return result
        return made

    def _fused(
        self,
        x_BSH: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor | str:
        """The result, or why the kernels can't make it."""
        fused = self.__dict__.get("_kernel")
        if fused is None or not fused.stands():
            fused = self._prepare()
            if isinstance(fused, str):
                return fused
        if (reason := _unfit(x_BSH)) or position_embeddings is None:
            return reason or "no position embeddings"
        batch, tokens, _ = x_BSH.shape
        held = self._cache_layer(cache if cache is not None else past_key_values, fused, batch)
        if isinstance(held, str):
            return held
        seen = 0 if attention_mask is None else first_tokens(attention_mask, tokens, held.past, fused.window)
        if isinstance(seen, str):
            return seen
        cos, sin = (
            each if each.dtype is torch.float32 and each.is_contiguous() else each.float().contiguous()
            for each in position_embeddings
        )
        out = torch.empty_like(x_BSH, dtype=torch.float32, memory_format=torch.contiguous_format).copy_(x_BSH)
        held.room(tokens)
        keys, values = held.stored
        try:
            fused.run(
                out.data_ptr(), batch, tokens, cos.data_ptr(), sin.data_ptr(), cos.shape[0] == 1,
                KINDS[keys.dtype], keys.data_ptr(), values.data_ptr(), keys.shape[2], held.past,
                0 if isinstance(seen, int) else seen.data_ptr(), torch.get_num_threads(),
            )  # fmt: skip
        except OverflowError as error:
            raise KtoptError(
                f"layer {fused.index}: {error} (more than 65504): give KDecoderLayer `kv_dtype: float32` or bfloat16"
            ) from None
        held.advance(tokens)
        return out if x_BSH.dtype is torch.float32 else out.to(x_BSH.dtype)

    def _prepare(self) -> Fused | str:
        described = describe(self)
        if not isinstance(described, str):
            self.__dict__["_kernel"] = described
        return described

    def _cache_layer(self, cache: Any, fused: Fused, batch: int) -> GrowingLayer | str:
        """The cache's layer, or one for this call alone."""
        held = GrowingLayer(self.kv_dtype) if cache is None else growing_layer(cache, fused.index, self.kv_dtype)
        if held is None:
            kind = type(cache.layers[fused.index]).__name__ if fused.index < len(cache.layers) else type(cache).__name__
            return f"a cache of another kind ({kind})"
        if not held.is_initialized:
            none = torch.empty(batch, fused.kv_heads, 0, fused.head_dim, dtype=self.kv_dtype)
            held.lazy_initialization(none, none)
        keys = held.stored[0]
        if keys.dtype not in KINDS or not keys.is_cpu or keys.shape[0] != batch:
            return f"a cache of {keys.dtype} for {keys.shape[0]} sequences on {keys.device}"
        if isinstance(held, GrowingSlidingLayer) and held.sliding_window != fused.window:
            return f"a cache with a window of {held.sliding_window}"
        return held

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without what the kernels were given, which names this process's memory."""
        return {name: value for name, value in self.__dict__.items() if name != "_kernel"}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (self.origin,), self.__getstate__()


@cache
def _fused_class(origin: Any) -> Any:
    return type(f"K{origin.__name__}", (KDecoderLayer, origin), {"origin": origin, "__module__": __name__})


def _blank(origin: Any) -> Any:
    """A fused layer without children: to be filled."""
    made = _fused_class(origin)
    layer: Any = made.__new__(made)
    nn.Module.__init__(layer)
    return layer


def _unfit(x: torch.Tensor) -> str:
    """Why the kernels can't take this input, or ""."""
    if not x.is_cpu or isinstance(x, FakeTensor):
        return "an input that isn't in this machine's memory"
    if x.requires_grad and torch.is_grad_enabled():
        return "a gradient is asked for"
    if x.numel() == 0 or not x.is_floating_point():
        return "an input without numbers"
    return ""


@lru_cache(maxsize=256)
def _say(name: str, reason: str) -> None:
    log.warning("%s runs as transformers has it, not as one kernel: %s", name, reason)
